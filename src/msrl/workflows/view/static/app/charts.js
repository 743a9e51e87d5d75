/** Curves (uPlot) and small bar charts (SVG) in the colors of the page. */

import { runColor, state } from "./state.js";
import { download, el, fill } from "./dom.js";
import { digits, duration } from "./text.js";

const HEIGHT = 168;
const TICK = 6.6; // width of a digit at an axis in pixels
const SYNC = uPlot.sync("steps");
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 2 });

/** What the x axis of the curves counts: its name, its values in a run, and their text. */
export const AXES = {
  step: { label: "step", values: (metrics) => metrics.steps, text: digits },
  time: { label: "time", values: (metrics) => metrics.time, text: duration },
  tokens: { label: "tokens", values: (metrics) => metrics.tokens, text: (value) => COMPACT.format(value) },
};

function axisOfX() {
  return AXES[state.axis] ?? AXES.step;
}

/** Return the curve of a metric in a run for `curveCard`, or null without values. */
export function metricLine(number, name) {
  const { metrics, name: label } = state.runs[number];
  const values = metrics.values[name];
  const x = axisOfX().values(metrics);
  if (!x || !values?.some((value) => value !== null) || state.hidden.has(number)) return null;
  return { run: number, label, x, values };
}

/** Return the marks of the shown runs at their places on the x axis. */
export function marks() {
  return state.runs.map((run, number) => {
    const x = axisOfX().values(run.metrics) ?? [];
    const places = (steps) => steps.map((step) => x[run.metrics.steps.indexOf(step)]).filter((at) => at !== undefined);
    return { run: number, ...Object.fromEntries(Object.entries(run.markers).map(([kind, steps]) => [kind, places(steps)])) };
  }).filter(({ run }) => !state.hidden.has(run));
}

/** Return a color of style.css. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Return the exponential moving average of values; nulls stay nulls. */
export function smooth(values, weight) {
  let average = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total; // corrects the bias of the first values
  });
}

/**
 * Return a card with the curves of a metric of all shown runs, drawn when it becomes visible.
 *
 * `lines` are those of `metricLine`, `markers` those of `marks`.
 */
export function curveCard(title, lines, markers) {
  const values = el("span", { class: "readout", "aria-hidden": "true" });
  const plot = el("div", { class: "plot", role: "img", "aria-label": summary(title, lines) });
  const element = el("figure", { class: "curve" },
    el("figcaption", {}, el("span", { class: "name" }, title), values), plot,
    el("div", { class: "exports" },
      exportButton("SVG", title, () => download(`${title}.svg`, "image/svg+xml", chartSvg(chart, title, lines))),
      exportButton("CSV", title, () => download(`${title}.csv`, "text/csv", chartCsv(lines)))));
  let chart = null;
  const draw = () => {
    chart?.destroy();
    fill(plot);
    chart = drawCurves(plot, lines, markers, values);
  };
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting) && plot.clientWidth) {
      observer.disconnect();
      draw();
      new ResizeObserver(() => {
        if (chart && plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: HEIGHT });
      }).observe(plot);
    }
  }, { rootMargin: "200px" });
  observer.observe(plot);
  element.redraw = () => chart && draw();
  return element;
}

function exportButton(format, title, save) {
  return el("button", { type: "button", "aria-label": `Save ${title} as ${format}`, on: { click: save } }, format);
}

/** Return what a reader who does not see the curves needs. */
function summary(title, lines) {
  const { label: name, text } = axisOfX();
  const parts = lines.map(({ label, x, values }) => {
    const known = values.map((value, i) => [value, x[i]]).filter(([value]) => value !== null);
    const [last, end] = known[known.length - 1];
    return `${label}: ${digits(known[0][0])} at ${name} ${text(known[0][1])}, ${digits(last)} at ${name} ${text(end)}`;
  });
  return `${title}. ${parts.join(". ")}`;
}

function drawCurves(plot, lines, markers, readout) {
  const isSmoothed = state.smoothing > 0;
  const tables = [];
  const series = [{ label: "step" }];
  for (const { run, label, x, values: recorded } of lines) {
    // A logarithmic axis has no place for zero and negative values.
    const values = state.isLog ? recorded.map((value) => (value > 0 ? value : null)) : recorded;
    const stroke = color(`run-${runColor(run)}`);
    const known = values.reduce((sum, value) => sum + (value === null ? 0 : 1), 0);
    const points = { show: known <= 40, size: 5, fill: stroke };
    const line = { label, stroke, width: 1.75, points, spanGaps: true };
    if (isSmoothed) {
      tables.push([x, values], [x, smooth(values, state.smoothing)]);
      series.push({ ...line, width: 1, alpha: 0.28, points: { show: false }, isRaw: true });
      series.push({ ...line, width: 2, points: { show: false } });
    } else {
      tables.push([x, values]);
      series.push(line);
    }
  }
  const data = uPlot.join(tables);
  if (!data.slice(1).some((values) => values.some((value) => value !== null && value !== undefined))) {
    fill(plot, el("p", { class: "quiet small" }, "No positive value for a logarithmic axis."));
    return null;
  }
  const chart = new uPlot({
    width: plot.clientWidth,
    height: HEIGHT,
    padding: [8, 24, 0, 0], // room for half of the last tick's text
    series,
    legend: { show: false },
    cursor: { y: false, sync: { key: SYNC.key }, drag: { x: true, y: false },
      points: { size: 7 } },
    scales: { x: { time: false }, y: { distr: state.isLog ? 3 : 1, range: valueRange } },
    axes: [
      { ...axis(), values: (_, ticks) => ticks.map(axisOfX().text) },
      { ...axis(), size: tickWidth, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : digits(tick))) },
    ],
    hooks: {
      draw: [(u) => drawMarkers(u, markers)],
      setCursor: [(u) => showValues(u, readout, series)],
    },
  }, data, plot);
  showValues(chart, readout, series);
  return chart;
}

/** Return the ends of the y axis. A constant gets a line in the middle. */
function valueRange(u, low, high) {
  if (low === null) return [0, 1];
  if (state.isLog) return uPlot.rangeLog(low, high, 10, false);
  if (low === high) return [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function tickWidth(u, texts) {
  return 16 + TICK * Math.max(3, ...(texts ?? []).map((text) => text.length));
}

function axis() {
  const font = "11px system-ui, sans-serif";
  return {
    stroke: color("quiet"), font, size: 26, gap: 4,
    grid: { stroke: color("grid"), width: 1 }, ticks: { show: false },
  };
}

/** Draw checkpoints (triangles), evaluations (circles) and restarts (dashed) in the colors of their runs. */
function drawMarkers(u, markers) {
  const { ctx, bbox } = u;
  const size = 4 * devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  const inside = (places) => places.map((place) => u.valToPos(place, "x", true))
    .filter((x) => x >= bbox.left - size && x <= bbox.left + bbox.width + size);
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const { run, checkpoints, evaluations, restarts } of markers) {
    ctx.strokeStyle = color(`run-${runColor(run)}`);
    ctx.fillStyle = ctx.strokeStyle;
    ctx.setLineDash([]);
    for (const x of inside(evaluations)) {
      ctx.beginPath();
      ctx.arc(x, bbox.top + 0.7 * size, 0.7 * size, 0, 2 * Math.PI);
      ctx.stroke();
    }
    for (const x of inside(checkpoints)) {
      ctx.beginPath();
      ctx.moveTo(x - size, bottom);
      ctx.lineTo(x + size, bottom);
      ctx.lineTo(x, bottom - 1.6 * size);
      ctx.fill();
    }
    ctx.setLineDash([4, 4]);
    for (const x of inside(restarts).map(Math.round)) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
  }
  ctx.restore();
}

/** Write the values under the cursor, else the last ones. */
function showValues(u, readout, series) {
  const index = u.cursor.idx;
  const parts = [];
  const { label, text } = axisOfX();
  const place = index === null || index === undefined ? null : u.data[0][index];
  series.forEach((line, i) => {
    if (i === 0 || line.isRaw) return;
    const values = u.data[i];
    let at = index ?? values.length - 1;
    while (at > 0 && (values[at] === null || values[at] === undefined)) at -= 1;
    const marker = el("i", { class: "dot" });
    marker.style.background = line.stroke;
    parts.push(el("span", {}, series.length > 2 ? marker : null, digits(values[at])));
  });
  fill(readout, place === null ? null : el("span", { class: "at" }, `${label} ${text(place)}`), parts);
}

/** Return the values of a chart as CSV: a row per place on the x axis, a column per run. */
function chartCsv(lines) {
  const [x, ...columns] = uPlot.join(lines.map((line) => [line.x, line.values]));
  // A spreadsheet computes cells that begin like a formula.
  const cell = (text) => `"${text.replace(/"/g, '""').replace(/^(?=[=+@\t\r-])/, "'")}"`;
  const rows = x.map((place, i) => [place, ...columns.map((values) => values[i] ?? "")].join(","));
  return [[axisOfX().label, ...lines.map(({ label }) => cell(label))].join(","), ...rows, ""].join("\n");
}

/** Return a drawn chart as the text of an SVG file. */
function chartSvg(chart, title, lines) {
  const [WIDTH, LEGEND] = [chart.width, 34];
  const at = (value, scale) => Number((chart.valToPos(value, scale) + (scale === "y" ? top : left)).toFixed(1));
  const [left, top] = [chart.bbox.left / devicePixelRatio, chart.bbox.top / devicePixelRatio + LEGEND];
  const [right, bottom] = [left + chart.bbox.width / devicePixelRatio, top + chart.bbox.height / devicePixelRatio];
  const label = (x, y, text, anchor = "start", fill = color("quiet")) => el("text", { x, y, fill, "text-anchor": anchor }, text);
  const [ticksX, ticksY] = chart.axes.map(({ _splits, _values }) => _splits.map((split, i) => [split, _values[i]]));
  const svg = el("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${WIDTH} ${HEIGHT + LEGEND}`, width: WIDTH,
    height: HEIGHT + LEGEND, "font-family": "system-ui, sans-serif", "font-size": 11 },
  el("rect", { width: "100%", height: "100%", fill: color("card") }),
  label(left, 14, title, "start", color("text")),
  lines.map(({ run, label: name }, i) => label(left + i * ((right - left) / lines.length), 29, name, "start", color(`run-${runColor(run)}`))),
  ticksX.filter(([tick]) => at(tick, "x") <= right + 1).map(([tick, text]) => label(at(tick, "x"), bottom + 16, text, "middle")),
  ticksY.filter(([, text]) => text).map(([tick, text]) => [
    el("line", { x1: left, x2: right, y1: at(tick, "y"), y2: at(tick, "y"), stroke: color("grid") }),
    label(left - 6, at(tick, "y") + 4, text, "end")]),
  chart.series.slice(1).map((series, i) => {
    const points = chart.data[0].map((x, j) => [x, chart.data[i + 1][j]])
      .filter(([x, y]) => y !== null && y !== undefined && x >= chart.scales.x.min && x <= chart.scales.x.max);
    return el("polyline", { fill: "none", stroke: series.stroke(), "stroke-width": series.width, opacity: series.alpha ?? 1,
      points: points.map(([x, y]) => `${at(x, "x")},${at(y, "y")}`).join(" ") });
  }));
  return new XMLSerializer().serializeToString(svg);
}

/**
 * Return a histogram as SVG. `parts` are {name, kind, values}: stacked bars, whose colors are the
 * classes bar-KIND.
 */
export function histogram(label, parts, bins = 24) {
  const all = parts.flatMap((part) => part.values).filter((value) => value !== null);
  if (!all.length) return el("p", { class: "quiet" }, "No values.");
  let low = all[0];
  let high = all[0];
  for (const value of all) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const number = low === high ? 1 : bins;
  const width = (high - low) / number || 1;
  const counts = parts.map(({ values }) => {
    const bars = new Array(number).fill(0);
    for (const value of values) {
      if (value !== null) bars[Math.min(number - 1, Math.floor((value - low) / width))] += 1;
    }
    return bars;
  });
  return drawHistogram(label, parts, counts, low, high);
}

function drawHistogram(label, parts, counts, low, high) {
  const [W, H, FOOT] = [360, 120, 16];
  const number = counts[0].length;
  const totals = counts[0].map((_, i) => counts.reduce((sum, bars) => sum + bars[i], 0));
  const scale = (H - FOOT - 14) / Math.max(...totals);
  const bar = W / number;
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, class: "histogram", role: "img",
    "aria-label": `${label}: ${totals.reduce((a, b) => a + b, 0)} values from ${digits(low)} to ${digits(high)}` });
  totals.forEach((_, i) => {
    let y = H - FOOT;
    parts.forEach((part, p) => {
      const height = counts[p][i] * scale;
      if (!height) return;
      y -= height;
      const from = digits(low + ((high - low) * i) / number);
      svg.append(el("rect", { x: i * bar + 0.75, y, width: Math.max(bar - 1.5, 1), height,
        class: `bar-${part.kind}` }, el("title", {}, `${part.name}: ${counts[p][i]} from ${from}`)));
    });
  });
  svg.append(
    el("line", { x1: 0, x2: W, y1: H - FOOT, y2: H - FOOT, class: "base" }),
    el("text", { x: 1, y: H - 3 }, digits(low)),
    el("text", { x: W - 1, y: H - 3, "text-anchor": "end" }, low === high ? "" : digits(high)),
    el("text", { x: W - 1, y: 10, "text-anchor": "end" }, `max ${Math.max(...totals)}`),
  );
  return svg;
}
