"use strict";
// What a person does on the page: the controls, the keys, the time line, copying, and following a run that goes on.
(() => {
  const { page, view } = windlass;
  const element = (id) => document.getElementById(id);
  const SIGNS = { save: "▲", best: "★", damaged: "✖", evaluation: "○", rolled_back: "↶", skipped_update: "∅",
    out_of_memory: "▦", alert: "!", arguments_changed: "≠", restart: "↻", uploaded: "⇧", upload_failed: "⇪" };

  // --- the time line ------------------------------------------------------------------------------------------------

  // Where a mark is on the chosen axis. Tokens are those of the last row before it.
  function place(run, mark) {
    if (view.axis !== "k") return view.axis === "s" ? mark.step : mark.t;
    const counted = Object.values(run.series).find((series) => series.k);
    if (!counted) return null;
    const before = counted.t.filter((seconds) => seconds <= mark.t).length;
    return before ? counted.k[before - 1] : 0;
  }

  function percent(x) {
    const [low, high] = windlass.whole();
    return Math.min(Math.max(((x - low) / (high - low)) * 100, 0), 100);
  }

  function bar(run, attempt) {
    const ends = view.axis === "s" ? [attempt.from, attempt.to] : [attempt.t0, attempt.t1 ?? attempt.t0];
    const span = document.createElement("span");
    span.className = `attempt is-${attempt.status}`;
    span.style.left = `${percent(ends[0])}%`;
    span.style.width = `${Math.max(percent(ends[1]) - percent(ends[0]), 0.3)}%`;
    span.title = `attempt ${attempt.number}: steps ${attempt.from} to ${attempt.to}, ${attempt.status}`;
    return span;
  }

  function button(run, mark) {
    const x = place(run, mark);
    if (x === null) return null;
    const made = document.createElement("button");
    made.type = "button";
    made.className = `mark m-${mark.kind}`;
    made.textContent = SIGNS[mark.kind] || "•";
    made.style.left = `${percent(x)}%`;
    made.title = `step ${mark.step}: ${mark.text}`;
    made.setAttribute("aria-label", made.title);
    made.addEventListener("click", () => windlass.visit(x));
    return made;
  }

  function timeline() {
    const host = element("timeline");
    host.replaceChildren();
    for (const run of page.runs) {
      if (page.runs.length > 1) host.append(Object.assign(document.createElement("div"), { className: "label", textContent: run.name }));
      const row = document.createElement("div");
      row.className = "lane";
      if (view.axis !== "k") row.append(...run.attempts.map((attempt) => bar(run, attempt)));
      row.append(...run.marks.map((mark) => button(run, mark)).filter(Boolean));
      host.append(row);
    }
    const kinds = [...new Set(page.runs.flatMap((run) => run.marks.map((mark) => mark.kind)))];
    const legend = document.createElement("div");
    legend.className = "legend";
    legend.textContent = kinds.map((kind) => `${SIGNS[kind] || "•"} ${kind.replaceAll("_", " ")}`).join("   ");
    host.append(legend);
    host.hidden = !kinds.length && !page.runs.some((run) => run.attempts.length);
  }

  // --- controls and keys --------------------------------------------------------------------------------------------

  function redraw() {
    windlass.draw();
    timeline();
  }

  function offer() {
    const has = (axis) => page.runs.some((run) => Object.values(run.series).some((series) => series[axis]));
    for (const option of element("axis").options) option.disabled = !has(option.value);
    element("difference-label").hidden = page.runs.length < 2;
  }

  function setAxis(axis) {
    view.axis = element("axis").value = axis;
    view.range = null;
    redraw();
  }

  function nextAxis() {
    const open = [...element("axis").options].filter((option) => !option.disabled).map((option) => option.value);
    setAxis(open[(open.indexOf(view.axis) + 1) % open.length]);
  }

  function flip(name) {
    if (name === "difference" && page.runs.length < 2) return;
    view[name] = element(name).checked = !view[name];
    windlass.draw();
  }

  const KEYS = { ArrowLeft: () => windlass.move(-0.25), ArrowRight: () => windlass.move(0.25), "+": () => windlass.scale(0.5),
    "=": () => windlass.scale(0.5), "-": () => windlass.scale(2), 0: () => windlass.zoom(null),
    Escape: () => windlass.zoom(null), x: nextAxis, l: () => flip("log"), d: () => flip("difference") };

  document.addEventListener("keydown", (event) => {
    const typed = event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
    if (typed || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  element("axis").addEventListener("change", (event) => setAxis(event.target.value));
  element("smooth").addEventListener("input", (event) => { view.smooth = Number(event.target.value); windlass.draw(); });
  element("log").addEventListener("change", () => flip("log"));
  element("difference").addEventListener("change", () => flip("difference"));
  element("reset").addEventListener("click", () => windlass.zoom(null));
  window.addEventListener("resize", windlass.resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // Copy a command. Pages of files have no clipboard in some browsers: the text is selected for Ctrl-C then.
  document.addEventListener("click", async (event) => {
    const copied = event.target.closest("[data-copy]");
    if (!copied) return;
    try {
      await navigator.clipboard.writeText(copied.dataset.copy);
      copied.classList.add("is-copied");
    } catch {
      getSelection().selectAllChildren(copied);
    }
  });

  // --- a run that goes on -------------------------------------------------------------------------------------------

  // Add what is new to the curves of a run.
  function grow(run, { growth, attempts, marks }) {
    for (const [name, more] of Object.entries(growth.series)) {
      // Defined and not assigned: a metric may have a name such as `__proto__`.
      if (!Object.hasOwn(run.series, name)) {
        const value = { s: [], v: [], t: [], k: more.k && [], bad: 0 };
        Object.defineProperty(run.series, name, { value, enumerable: true, writable: true, configurable: true });
      }
      const series = run.series[name];
      if (series.k && !more.k) more.k = more.s.map(() => null);
      if (!series.k && more.k) series.k = series.s.map(() => null);
      for (const column of ["s", "v", "t", "k"]) if (series[column]) series[column].push(...more[column]);
      series.bad += more.bad;
    }
    const { clip } = growth;
    if (clip) run.clip = { at: clip.at, over: clip.over + (run.clip?.over || 0), of: clip.of + (run.clip?.of || 0) };
    run.attempts = attempts || run.attempts;
    run.marks = marks || run.marks;
  }

  function follow() {
    const source = new EventSource(page.live);
    source.onmessage = (event) => {
      const news = JSON.parse(event.data);
      news.runs.forEach((one, at) => {
        if (one.whole) page.runs[at] = one.whole; else grow(page.runs[at], one);
      });
      // HTML that the server has escaped, as in the page itself; scripts in it would not run.
      for (const [key, text] of Object.entries(news.sections)) element(key).innerHTML = text;
      document.body.dataset.bytes = String(event.data.length);
      document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
      offer();
      redraw();
    };
    const connected = (open) => () => {
      document.body.dataset.connection = open ? "open" : "lost";
      element("connection").hidden = open;
    };
    source.onerror = connected(false);
    source.onopen = connected(true);
  }

  offer();
  windlass.open(() => {
    document.body.dataset.drawn = String(windlass.charts().length);
    if (page.live) follow();
  });
  timeline();
})();
