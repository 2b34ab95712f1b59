"use strict";
// Line charts in SVG. Every text is set with textContent, so no value becomes markup.

const MARK_PX = 4; // from a decision to the pointer that names it

function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, String(value));
  node.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}

function figureText(value, unit) {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const text = value.toLocaleString("en-US", { maximumFractionDigits: digits });
  return unit ? `${text} ${unit}` : text;
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
}

function niceStep(top) {
  const raw = top / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
}

// A path with a gap where a value is unknown. A step holds its value until the next sample.
function linePath(times, values, x, y, isStep) {
  let path = "";
  let isDrawing = false;
  values.forEach((value, index) => {
    if (value === null) { isDrawing = false; return; }
    const at = `${x(times[index]).toFixed(1)}`;
    if (!isDrawing) path += `M${at} ${y(value).toFixed(1)}h.01`;
    else if (isStep) path += `H${at}V${y(value).toFixed(1)}`;
    else path += `L${at} ${y(value).toFixed(1)}`;
    isDrawing = true;
  });
  return path;
}

function latest(values) {
  return values.length ? values[values.length - 1] : null;
}

function spanText(times) {
  const minutes = times.length ? (times[times.length - 1] - times[0]) / 60 : 0;
  if (minutes < 1) return "the last minute";
  return minutes < 120 ? `the last ${Math.round(minutes)} minutes` : `the last ${Math.round(minutes / 60)} hours`;
}

function summary(chart) {
  const parts = chart.lines.map((line) => {
    const known = line.values.filter((value) => value !== null);
    if (!known.length) return `${line.label}: no measurements`;
    const now = figureText(latest(line.values), chart.unit);
    const low = figureText(Math.min(...known), chart.unit);
    const high = figureText(Math.max(...known), chart.unit);
    return `${line.label}: now ${now}, lowest ${low}, highest ${high}`;
  });
  const limit = chart.limit === null ? "" : ` ${chart.limitLabel}: ${figureText(chart.limit, chart.unit)}.`;
  return `${chart.title} over ${spanText(chart.times)}. ${parts.join(". ")}.${limit}`;
}

// chart: {title, unit, times, lines: [{label, values, isStep}], limit, limits, limitLabel, marks: [{time, text}]}
// limits are the limit's past values, if they are known. The newest one is the limit.
function chartFigure(chart, width) {
  const height = 168, left = 46, right = 14, top = 12, bottom = 24;
  const known = chart.lines.flatMap((line) => line.values.filter((value) => value !== null));
  const limits = (chart.limits || []).filter((value) => value !== null);
  const highest = Math.max(...known, ...limits, chart.limit ?? 0, 0);
  const step = niceStep((highest || 1) * 1.08);
  const ceiling = Math.max(1, Math.ceil((highest * 1.08) / step)) * step;
  const end = chart.times.length ? chart.times[chart.times.length - 1] : 0;
  const start = Math.min(chart.times[0] ?? end, end - 60);
  const x = (time) => left + ((time - start) / (end - start)) * (width - left - right);
  const y = (value) => top + (1 - value / ceiling) * (height - top - bottom);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(chart) });
  for (let value = 0; value <= ceiling * 1.001; value += step) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { class: "tick", x: left - 7, y: y(value) + 4, "text-anchor": "end" }, figureText(value)));
  }
  for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const time = start + share * (end - start);
    svg.append(shape("text", { class: "tick", x: x(time), y: height - 6, "text-anchor": anchor }, clock(time)));
  }
  for (const mark of chart.marks.filter(({ time }) => time >= start && time <= end)) {
    svg.append(shape("line", { class: "mark", x1: x(mark.time), x2: x(mark.time), y1: top, y2: height - bottom }));
  }
  if (limits.length) {
    svg.append(shape("path", { class: "limit", d: linePath(chart.times, chart.limits, x, y, true) }));
  } else if (chart.limit !== null) {
    svg.append(shape("line", { class: "limit", x1: left, x2: width - right, y1: y(chart.limit), y2: y(chart.limit) }));
  }
  chart.lines.forEach((line, index) => {
    svg.append(shape("path", { class: `line s${index}`, d: linePath(chart.times, line.values, x, y, line.isStep) }));
    const now = latest(line.values);
    if (now !== null) svg.append(shape("circle", { class: `dot s${index}`, cx: x(end), cy: y(now), r: 3.5 }));
  });
  const figure = element("figure", { class: "card chart" }, caption(chart), svg);
  addReadout(figure, svg, chart, { x, left, width, right, top, height, bottom });
  return figure;
}

function caption(chart) {
  const legend = element("span", { class: "legend" });
  chart.lines.forEach((line, index) => {
    const label = chart.lines.length > 1 ? `${line.label} ` : "";
    legend.append(element("span", { class: `key s${index}` }, label, element("b", {}, figureText(latest(line.values), chart.unit))));
  });
  if (chart.limit !== null) {
    legend.append(element("span", { class: "key limit" }, `${chart.limitLabel} ${figureText(chart.limit, chart.unit)}`));
  }
  return element("figcaption", {}, element("span", { class: "title" }, chart.title), legend);
}

// The values under the pointer. The accessible text is the summary, so this is hidden from it.
function addReadout(figure, svg, chart, box) {
  const line = shape("line", { class: "pointer", y1: box.top, y2: box.height - box.bottom, visibility: "hidden" });
  const text = element("p", { class: "readout", "aria-hidden": "true" });
  svg.append(line);
  figure.append(text);
  svg.addEventListener("pointermove", (event) => {
    const place = svg.getBoundingClientRect();
    const at = ((event.clientX - place.left) / place.width) * box.width;
    let nearest = 0;
    chart.times.forEach((time, index) => {
      if (Math.abs(box.x(time) - at) < Math.abs(box.x(chart.times[nearest]) - at)) nearest = index;
    });
    if (!chart.times.length) return;
    line.setAttribute("x1", box.x(chart.times[nearest]));
    line.setAttribute("x2", box.x(chart.times[nearest]));
    line.setAttribute("visibility", "visible");
    const values = chart.lines.map((each) => figureText(each.values[nearest], chart.unit));
    const near = chart.marks.filter((mark) => Math.abs(box.x(mark.time) - at) < MARK_PX).map((mark) => mark.text);
    text.textContent = [`${clock(chart.times[nearest])}  ${values.join(" / ")}`, ...near].join(", ");
  });
  svg.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    text.textContent = "";
  });
}
