// A settings dialog: tabs of switches, saved at the end. A wrong switch left wrong is a failure.
offer((random) => {
  const tabs = { Sound: ["Mute", "Echo"], Screen: ["Dark", "Large text"], Mail: ["Preview", "Threads"] };
  const names = shuffled(random, Object.keys(tabs));
  const state = Object.fromEntries(Object.values(tabs).flat().map((option) => [option, random() < 0.5]));
  const tab = pick(random, names);
  const option = pick(random, tabs[tab]);
  const target = { ...state, [option]: !state[option] };
  let open = null;
  const where = {};
  const draw = () => {
    if (open === null) {
      where.open = make("button", { text: "Settings", onclick: () => { open = names[0]; draw(); } });
      return show(where.open);
    }
    const heads = names.map((n) =>
      (where[n] = make("button", { text: n, className: n === open ? "on" : "", onclick: () => { open = n; draw(); } }))
    );
    const rows = tabs[open].map((o) => {
      where[o] = make("button", { text: state[o] ? "on" : "off", className: state[o] ? "on" : "" });
      where[o].onclick = () => { state[o] = !state[o]; draw(); };
      return make("div", { className: "row" }, make("span", { text: o }), where[o]);
    });
    where.save = make("button", { text: "Save", className: "main", onclick: () => commit() });
    show(make("div", { className: "row" }, ...heads), ...rows, where.save);
  };
  const right = () => Object.keys(state).every((o) => state[o] === target[o]);
  return {
    goal: `Turn ${target[option] ? "on" : "off"} "${option}" in the settings for ${tab}, and save.`,
    draw,
    right,
    next: () => {
      if (open === null) return at(where.open);
      if (right()) return at(where.save);
      const wrong = Object.keys(state).find((o) => state[o] !== target[o]);
      const home = names.find((n) => tabs[n].includes(wrong));
      return at(open === home ? where[wrong] : where[home]);
    },
  };
});
