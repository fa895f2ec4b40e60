// What every page shares: a generator of numbers by seed, a DOM made anew for each episode, and window.crossrl.
const rng = (seed) => () => {
  // mulberry32
  seed = (seed + 0x6d2b79f5) | 0;
  let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
};
const pick = (random, list) => list[Math.floor(random() * list.length)];
const shuffled = (random, list) => {
  const copy = [...list];
  for (let i = copy.length - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [copy[i], copy[j]] = [copy[j], copy[i]];
  }
  return copy;
};
const make = (tag, { text, ...rest } = {}, ...children) => {
  const e = Object.assign(document.createElement(tag), rest);
  if (text !== undefined) e.textContent = text;
  e.append(...children);
  return e;
};
const at = (e) => {
  const r = e.getBoundingClientRect();
  return { kind: "click", x: r.left + r.width / 2, y: r.top + r.height / 2 };
};
const show = (...children) => document.getElementById("app").replaceChildren(...children);

// `episode(random)` returns {goal, draw, right, next}: the instruction, what draws the first view, whether the state is
// right when it is committed, and the expert's next step. `commit()` ends the episode.
const offer = (episode) => {
  let current, verdict;
  window.commit = () => (verdict ??= { reward: current.right() ? 1 : 0, done: true });
  window.crossrl = {
    start: (seed) => {
      verdict = undefined;
      current = episode(rng(seed));
      document.getElementById("goal").textContent = current.goal;
      current.draw();
      return current.goal;
    },
    judge: () => verdict ?? { reward: 0, done: false },
    oracle: () => current.next(),
  };
};
