"use strict";
// The charts of the page. `windlass` is the only name that this page adds; controls.js drives it.
const windlass = (() => {
  // Of Okabe and Ito: distinguishable without seeing red, green or blue. Runs also differ in their dashes.
  const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999"];
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const AXES = { s: "update", k: "tokens", t: "seconds since the first start" };
  const FIRST = ["grad_norm", "learning_rate"];

  const page = JSON.parse(document.getElementById("data").textContent);
  const view = { axis: "s", smooth: 0, log: false, difference: false, range: null };
  let frames = [], charts = [];

  // --- data ---------------------------------------------------------------------------------------------------------

  const isLoss = (name) => name === "loss" || /^eval_(.+_)?loss$/.test(name);

  // What each chart shows, the most important first; metrics of one unit share one.
  function groups() {
    const all = [...new Set(page.runs.flatMap((run) => Object.keys(run.series)))];
    const take = (title, test) => {
      const names = all.filter(test);
      names.forEach((name) => all.splice(all.indexOf(name), 1));
      return names.length ? [{ title, names }] : [];
    };
    const first = [...take("loss", isLoss), ...FIRST.flatMap((first) => take(first, (name) => name === first))];
    const speed = ["tokens_per_second", "samples_per_second", "mfu", "data_wait"].flatMap((one) => take(one, (name) => name === one));
    const last = [...take("memory", (name) => /memory/.test(name)),
      ...take("seconds between reports", (name) => /_seconds$/.test(name) && !/^eval_/.test(name)),
      ...take("speed of evaluations", (name) => /^eval_.*(per_second|runtime)$/.test(name))];
    return [...first, ...all.map((name) => ({ title: name, names: [name] })), ...speed, ...last];
  }

  // A curve over the chosen axis, in its order: rows after a rollback have smaller steps than those before.
  function curve(run, name) {
    const series = run.series[name];
    const xs = series && series[view.axis];
    if (!xs) return null;
    const order = xs.map((x, at) => at).filter((at) => xs[at] !== null).sort((a, b) => xs[a] - xs[b] || a - b);
    return { x: order.map((at) => xs[at]), y: order.map((at) => series.v[at]) };
  }

  // A mean whose weights fall by `share` per point, without the bias of its beginning.
  function smoothed(ys, share) {
    let mean = 0, weight = 0;
    return ys.map((y) => {
      mean = share * mean + (1 - share) * y;
      weight = share * weight + (1 - share);
      return mean / weight;
    });
  }

  // The value of a curve between its points; null outside.
  function valueAt(line, x) {
    let low = 0, high = line.x.length - 1;
    if (high < 0 || x < line.x[0] || x > line.x[high]) return null;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (line.x[middle] <= x) low = middle; else high = middle;
    }
    const span = line.x[high] - line.x[low];
    if (span === 0 || x === line.x[high]) return line.y[high];
    return line.y[low] + ((x - line.x[low]) / span) * (line.y[high] - line.y[low]);
  }

  function lines(group) {
    const found = [];
    page.runs.forEach((run, at) => group.forEach((name, place) => {
      const line = curve(run, name);
      if (!line || !line.x.length) return;
      const label = page.runs.length > 1 ? `${run.name}: ${name}` : name;
      found.push({ ...line, label, name, run: at,
        colour: COLOURS[(page.runs.length > 1 ? at + place * page.runs.length : place) % COLOURS.length],
        dash: DASHES[at % DASHES.length] });
    }));
    if (!view.difference) return found;
    return found.filter((line) => line.run > 0).flatMap((line) => {
      const base = found.find((one) => one.run === 0 && one.name === line.name);
      if (!base) return [];
      const at = line.x.map((x, place) => place).filter((place) => valueAt(base, line.x[place]) !== null);
      return [{ ...line, label: `${line.label} - ${page.runs[0].name}`, x: at.map((place) => line.x[place]),
        y: at.map((place) => line.y[place] - valueAt(base, line.x[place])) }];
    });
  }

  // --- drawing ------------------------------------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(value) {
    if (value === null || value === undefined) return "";
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  }

  function series(line, ys, raw) {
    return { label: raw ? `${line.label} (raw)` : line.label, stroke: line.colour + (raw ? "59" : ""), dash: line.dash,
      width: raw ? 1 : 2, spanGaps: true, points: { show: !raw && line.x.length <= 40, size: 6, fill: colour("--card") },
      value: (chart, value) => short(value) };
  }

  // The ticks of a logarithmic axis: powers of ten. uPlot's own, rounded to decimals, never come to an end for values below 1e-22.
  function decades(low, high) {
    const [first, last] = [low, high].map((end) => Math.round(Math.log10(end)));
    const step = Math.ceil((last - first + 1) / 8);
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, at) => Number(`1e${first + at * step}`));
  }

  function options(title, width, specs, canLog) {
    const logarithmic = view.log && canLog;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    return {
      width, height: 240, series: [{ label: AXES[view.axis], value: (chart, value) => short(value) }, ...specs],
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [{ ...axis, values: (chart, ticks) => ticks.map(short) },
        { ...axis, size: 70, values: (chart, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))),
          ...(logarithmic ? { splits: (chart, axis, low, high) => decades(low, high), filter: (chart, ticks) => ticks } : {}) }],
      // The others follow the cursor, and not the drag: they get its range from `zoom`.
      cursor: { sync: { key: "windlass", filters: { pub: (type) => type !== "mousedown" && type !== "mouseup" } },
        bind: { dblclick: () => () => zoom(null) }, drag: { x: true, y: false, setScale: false } },
      hooks: { draw: title === "grad_norm" && !view.difference ? [limitLine] : [], setSelect: [(chart) => {
        if (chart.select.width < 3) return;
        const from = chart.posToVal(chart.select.left, "x");
        zoom([from, chart.posToVal(chart.select.left + chart.select.width, "x")]);
        chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }] },
    };
  }

  // The share of reported norms that were above the largest one that is not clipped.
  function clipped(title) {
    const runs = title === "grad_norm" ? page.runs.filter((run) => run.clip) : [];
    const told = ({ name, clip }) => `${page.runs.length > 1 ? `${name}: ` : ""}${(100 * clip.over / clip.of).toFixed(1)}% clipped at ${short(clip.at)}`;
    return runs.length ? ` (${runs.map(told).join("; ")})` : "";
  }

  // The norm above which gradients are clipped, as a line across the chart.
  function limitLine(chart) {
    const limits = new Set(page.runs.filter((run) => run.clip).map((run) => run.clip.at));
    for (const limit of limits) {
      const y = chart.valToPos(limit, "y", true);
      if (!(y >= chart.bbox.top && y <= chart.bbox.top + chart.bbox.height)) continue;
      chart.ctx.save();
      chart.ctx.strokeStyle = colour("--warn");
      chart.ctx.setLineDash([4, 6]);
      chart.ctx.beginPath();
      chart.ctx.moveTo(chart.bbox.left, y);
      chart.ctx.lineTo(chart.bbox.left + chart.bbox.width, y);
      chart.ctx.stroke();
      chart.ctx.restore();
    }
  }

  function framed({ title, names }) {
    const found = lines(names);
    const known = page.runs.flatMap((run) => names.filter((name) => Object.hasOwn(run.series, name)).map((name) => run.series[name]));
    const bad = known.reduce((sum, series) => sum + series.bad, 0);
    // A metric without a finite value has a caption alone.
    if (!found.length && (!bad || known.some((series) => series.s.length))) return null;
    const figure = document.createElement("figure");
    figure.className = "card";
    const caption = document.createElement("figcaption");
    caption.textContent = title + clipped(title) + (view.difference ? ", difference" : "") + (bad ? ` (${bad} non-finite left out)` : "");
    figure.append(caption);
    return { found, figure, caption, title };
  }

  function drawn({ found, figure, caption, title }) {
    const tables = [], specs = [];
    for (const line of found) {
      if (view.smooth > 0) {
        tables.push([line.x, line.y]);
        specs.push(series(line, line.y, true));
      }
      tables.push([line.x, view.smooth > 0 ? smoothed(line.y, view.smooth) : line.y]);
      specs.push(series(line, line.y, false));
    }
    // One run whose metrics were logged together has one axis already, also with a step that is repeated.
    const same = tables.every((one) => one[0].length === tables[0][0].length && one[0].every((x, at) => x === tables[0][0][at]));
    const data = same ? [tables[0][0], ...tables.map((one) => one[1])] : uPlot.join(tables);
    const positive = found.every((line) => line.y.every((y) => y > 0));
    const chart = new uPlot(options(title, figure.clientWidth - 32, specs, positive), data, figure);
    if (view.log && !positive) caption.textContent += " (linear: not all values are positive)";
    return { chart, figure, title, data };
  }

  function draw() {
    frame();
    charts = frames.map(drawn);
    zoom(view.range);
  }

  // The figures, without their charts.
  function frame() {
    const place = document.getElementById("charts");
    charts.forEach((one) => one.chart.destroy());
    charts = [];
    place.replaceChildren();
    // All figures before the first chart: how wide one is depends on how many there are.
    const figures = groups().map(framed).filter(Boolean);
    place.append(...figures.map((one) => one.figure));
    frames = figures.filter((one) => one.found.length);
    if (!figures.length) {
      const nothing = document.createElement("p");
      nothing.className = "muted";
      nothing.textContent = "Nothing has been logged yet.";
      place.append(nothing);
    }
  }

  // Draw what is in view, then the rest, one chart at a time; then call `done`. The first paint waits for the former alone.
  function open(done) {
    frame();
    const own = frames;
    const rest = own.filter((one) => one.figure.getBoundingClientRect().top >= innerHeight);
    charts = own.slice(0, own.length - rest.length).map(drawn);
    zoom(view.range);
    const next = () => {
      if (own !== frames) return done();  // all were drawn meanwhile
      const one = rest.shift();
      if (!one) return done();
      charts.push(drawn(one));
      zoom(view.range);
      setTimeout(next);
    };
    requestAnimationFrame(() => setTimeout(next));
  }

  // --- the range that all charts show -------------------------------------------------------------------------------

  function whole() {
    const ends = frames.flatMap((one) => one.found.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
    const low = Math.min(...ends), high = Math.max(...ends);
    return ends.length ? [low, high > low ? high : low + 1] : [0, 1];
  }

  function zoom(range) {
    const [low, high] = whole();
    const smallest = (high - low) * 1e-6;
    const wanted = range && range[1] - range[0] < smallest ? [range[0], range[0] + smallest] : range;
    view.range = wanted && wanted[1] - wanted[0] < high - low ? wanted : null;
    const [min, max] = view.range || [low, high];
    charts.forEach((one) => one.chart.setScale("x", { min, max }));
    document.body.dataset.range = view.range ? view.range.join(" ") : "";
  }

  function move(share) {
    const [low, high] = view.range || whole();
    zoom([low + share * (high - low), high + share * (high - low)]);
  }

  function scale(factor) {
    const [low, high] = view.range || whole();
    const middle = (low + high) / 2;
    zoom([middle - ((high - low) * factor) / 2, middle + ((high - low) * factor) / 2]);
  }

  // Show the surroundings of a place in every chart, with the cursor on it.
  function visit(x) {
    const [low, high] = view.range || whole();
    const half = view.range ? (high - low) / 2 : (high - low) / 8;
    zoom([x - half, x + half]);
    charts.forEach((one) => one.chart.setCursor({ left: one.chart.valToPos(x, "x"), top: 20 }));
  }

  function resize() {
    charts.forEach((one) => one.chart.setSize({ width: Math.max(one.figure.clientWidth - 32, 200), height: 240 }));
  }

  return { page, view, draw, open, zoom, move, scale, visit, whole, resize, short, charts: () => charts };
})();
