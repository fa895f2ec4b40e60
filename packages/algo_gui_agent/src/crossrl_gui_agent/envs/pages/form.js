// A form: a name, one of three plans, a box to tick, a button.
offer((random) => {
  const name = pick(random, ["Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana"]);
  const plan = pick(random, ["Basic", "Plus", "Pro"]);
  const news = random() < 0.5;
  const state = { name: "", plan: null, news: !news };
  const field = make("input", { type: "text", oninput: (e) => (state.name = e.target.value) });
  const plans = shuffled(random, ["Basic", "Plus", "Pro"]).map((text) =>
    make("button", {
      text,
      onclick: () => {
        state.plan = text;
        plans.forEach((b) => b.classList.toggle("on", b.textContent === text));
      },
    })
  );
  const box = make("input", { type: "checkbox", checked: state.news, onchange: (e) => (state.news = e.target.checked) });
  const send = make("button", { text: "Send", className: "main", onclick: () => commit() });
  const rows = [
    make("div", { className: "row" }, make("span", { text: "Name" }), field),
    make("div", { className: "row" }, make("span", { text: "Plan" }), ...plans),
    make("div", { className: "row" }, box, make("span", { text: "Send me news" })),
  ];
  return {
    goal: `Sign up ${name} for the plan ${plan}, ${news ? "with" : "without"} news.`,
    draw: () => show(...shuffled(random, rows), make("div", { className: "row" }, send)),
    right: () => state.name.trim() === name && state.plan === plan && state.news === news,
    next: () => {
      if (state.name !== name) return document.activeElement === field ? { kind: "type", text: name } : at(field);
      if (state.plan !== plan) return at(plans.find((b) => b.textContent === plan));
      return state.news === news ? at(send) : at(box);
    },
  };
});
