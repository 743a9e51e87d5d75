/** Curves (uPlot) and small bar charts (SVG) in the colors of the page. */

import { runColor, state } from "./state.js";
import { el, fill } from "./dom.js";
import { digits } from "./text.js";

const HEIGHT = 168;
const SYNC = uPlot.sync("steps");

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
 * `lines` are {run, label, steps, values}.
 */
export function curveCard(title, lines, markers) {
  const values = el("span", { class: "readout", "aria-hidden": "true" });
  const plot = el("div", { class: "plot", role: "img", "aria-label": summary(title, lines) });
  const element = el("figure", { class: "curve" },
    el("figcaption", {}, el("span", { class: "name" }, title), values), plot);
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

/** Return what a reader who does not see the curves needs. */
function summary(title, lines) {
  const parts = lines.map(({ label, steps, values }) => {
    const known = values.map((value, i) => [value, steps[i]]).filter(([value]) => value !== null);
    if (!known.length) return `${label}: no values`;
    const [last, step] = known[known.length - 1];
    return `${label}: ${digits(known[0][0])} at step ${known[0][1]}, ${digits(last)} at step ${step}`;
  });
  return `${title}. ${parts.join(". ")}`;
}

function drawCurves(plot, lines, markers, readout) {
  const isSmoothed = state.smoothing > 0;
  const tables = [];
  const series = [{ label: "step" }];
  for (const { run, label, steps, values, dash } of lines) {
    const stroke = color(`run-${runColor(run)}`);
    const known = values.reduce((sum, value) => sum + (value === null ? 0 : 1), 0);
    const points = { show: known <= 40, size: 5, fill: stroke };
    const line = { label, stroke, width: 1.75, points, spanGaps: true, dash };
    if (isSmoothed) {
      tables.push([steps, values], [steps, smooth(values, state.smoothing)]);
      series.push({ ...line, width: 1, alpha: 0.28, points: { show: false }, isRaw: true });
      series.push({ ...line, width: 2, points: { show: false } });
    } else {
      tables.push([steps, values]);
      series.push(line);
    }
  }
  const data = uPlot.join(tables);
  const chart = new uPlot({
    width: plot.clientWidth,
    height: HEIGHT,
    padding: [8, 10, 0, 0],
    series,
    legend: { show: false },
    cursor: { y: false, sync: { key: SYNC.key }, drag: { x: true, y: false },
      points: { size: 7 } },
    scales: { x: { time: false } },
    axes: [axis(), { ...axis(), size: 52, values: (_, ticks) => ticks.map(digits) }],
    hooks: {
      draw: [(u) => drawMarkers(u, markers)],
      setCursor: [(u) => showValues(u, readout, series)],
    },
  }, data, plot);
  showValues(chart, readout, series);
  return chart;
}

function axis() {
  const font = "11px system-ui, sans-serif";
  return {
    stroke: color("quiet"), font, size: 26, gap: 4,
    grid: { stroke: color("grid"), width: 1 }, ticks: { show: false },
  };
}

/** Draw the steps of checkpoints (triangles), evaluations (circles) and restarts (dashed lines). */
function drawMarkers(u, markers) {
  const { ctx, bbox } = u;
  const size = 4 * devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = color("quiet");
  ctx.lineWidth = devicePixelRatio;
  for (const step of markers.evaluations) {
    ctx.beginPath();
    ctx.arc(u.valToPos(step, "x", true), bbox.top + 0.7 * size, 0.7 * size, 0, 2 * Math.PI);
    ctx.stroke();
  }
  for (const step of markers.restarts) {
    const x = Math.round(u.valToPos(step, "x", true));
    ctx.strokeStyle = color("bad");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = color("accent");
  const bottom = bbox.top + bbox.height;
  for (const step of markers.checkpoints) {
    const x = u.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x - size, bottom);
    ctx.lineTo(x + size, bottom);
    ctx.lineTo(x, bottom - 1.6 * size);
    ctx.fill();
  }
  ctx.restore();
}

/** Write the values under the cursor, else the last ones. */
function showValues(u, readout, series) {
  const index = u.cursor.idx;
  const parts = [];
  let step = index === null || index === undefined ? null : u.data[0][index];
  series.forEach((line, i) => {
    if (i === 0 || line.isRaw) return;
    const values = u.data[i];
    let at = index ?? values.length - 1;
    while (at > 0 && (values[at] === null || values[at] === undefined)) at -= 1;
    const marker = el("i", { class: "dot" });
    marker.style.background = line.stroke;
    parts.push(el("span", {}, series.length > 2 ? marker : null, digits(values[at])));
  });
  fill(readout, step === null ? null : el("span", { class: "at" }, `step ${step}`), parts);
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
