// A shop: a list of goods, a page for each with a quantity, a cart, a checkout.
offer((random) => {
  const goods = shuffled(random, ["Lamp", "Desk", "Chair", "Clock", "Vase", "Rug"]).slice(0, 4);
  const price = Object.fromEntries(goods.map((g) => [g, 5 + Math.floor(random() * 90)]));
  const wanted = pick(random, goods);
  const count = 1 + Math.floor(random() * 3);
  const cart = {};
  let view = "list";
  let quantity = 1;
  let buttons = {};
  const button = (text, onclick, className = "") => (buttons[text] = make("button", { text, onclick, className }));
  const go = (to) => {
    view = to;
    buttons = {};
    const top = make("div", { className: "row" }, button("Shop", () => go("list")), button("Cart", () => go("cart")));
    if (view === "list")
      show(top, ...goods.map((g) =>
        make("div", { className: "row" }, button(g, () => { quantity = 1; go(g); }), make("span", { text: `${price[g]} EUR` }))
      ));
    else if (view === "cart")
      show(top, ...Object.entries(cart).map(([g, n]) => make("div", { className: "row", text: `${n} x ${g}` })),
        button("Order", () => commit(), "main"));
    else {
      const shown = make("span", { text: quantity });
      const by = (d) => () => (shown.textContent = quantity = Math.max(1, quantity + d));
      show(top, make("div", { className: "row", text: `${view}, ${price[view]} EUR` }),
        make("div", { className: "row" }, button("-", by(-1)), shown, button("+", by(1))),
        button("Add to cart", () => { cart[view] = (cart[view] ?? 0) + quantity; go("cart"); }, "main"));
    }
  };
  const full = () => Object.keys(cart).length === 1 && cart[wanted] === count;
  return {
    goal: `Order ${count} x ${wanted}, nothing else.`,
    draw: () => go("list"),
    right: full,
    next: () => {
      if (full()) return at(view === "cart" ? buttons["Order"] : buttons["Cart"]);
      if (view === "list") return at(buttons[wanted]);
      if (view !== wanted) return at(buttons["Shop"]);
      return at(quantity < count ? buttons["+"] : quantity > count ? buttons["-"] : buttons["Add to cart"]);
    },
  };
});
