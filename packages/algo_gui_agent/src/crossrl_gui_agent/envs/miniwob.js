// MiniWoB++'s pages behind window.crossrl, and a scripted expert for some of them.
() => {
  core.EPISODE_MAX_TIME = 2e9; // the wall clock is not part of the task
  const text = (e) => (e.value && e.tagName === "INPUT" ? e.value : e.textContent).replace(/\s+/g, " ").trim();
  const find = (selector, label) => [...document.querySelectorAll(selector)].find((e) => label === undefined || text(e) === label);
  const seen = (e) => e && e.getBoundingClientRect().width > 0 && getComputedStyle(e).visibility !== "hidden";
  const click = (e) => {
    const r = e.getBoundingClientRect();
    return { kind: "click", x: r.left + r.width / 2, y: r.top + r.height / 2 };
  };
  const quoted = () => core.getUtterance().match(/"([^"]*)"/)[1];
  const submit = () => click(find("#subbtn"));
  // type into the field, then submit
  const fill = (selector, value) => {
    const field = find(selector);
    if (field.value === value) return submit();
    return document.activeElement === field ? { kind: "type", text: value } : click(field);
  };
  const checkboxes = () => {
    const wanted = core.getUtterance().match(/^Select (.*) and click Submit/)[1].split(", ");
    const label = [...document.querySelectorAll("#boxes label")].find(
      (l) => wanted.includes(text(l)) !== l.querySelector("input").checked
    );
    return label ? click(label.querySelector("input")) : submit();
  };
  const collapsible = () => (seen(find(".ui-accordion-content")) ? submit() : click(find("#area h3")));
  const experts = {
    "click-test": submit,
    "click-test-2": () => click(find("#subbtn")),
    "click-test-transfer": () => click(find("#subbtn")),
    "click-button": () => click(find("#area button", quoted())),
    "click-dialog": () => click(find(".ui-dialog-titlebar-close")),
    "click-dialog-2": () =>
      click(quoted() === "x" ? find(".ui-dialog-titlebar-close") : find(".ui-dialog-buttonset button", quoted())),
    "click-collapsible": collapsible,
    "click-collapsible-nodelay": collapsible,
    "click-checkboxes": checkboxes,
    "click-checkboxes-transfer": checkboxes,
    "click-link": () => click(find(".alink", quoted())),
    "focus-text": () => click(find("#tt")),
    "enter-text": () => fill("#tt", quoted()),
  };
  const task = location.pathname.split("/").pop().replace(".html", "");
  window.crossrl = {
    start: (seed) => {
      if (!WOB_DONE_GLOBAL && core.EP_TIMER !== null) core.endEpisode(0);
      Math.seedrandom("crossrl " + seed);
      if (document.activeElement) document.activeElement.blur();
      core.startEpisodeReal();
      const goal = core.getUtterance();
      return typeof goal === "string" ? goal : goal.utterance;
    },
    judge: () => ({ reward: Math.max(0, Math.min(1, WOB_RAW_REWARD_GLOBAL)), done: WOB_DONE_GLOBAL }),
    oracle: () => (experts[task] ? experts[task]() : null),
  };
}
