"use strict";
// The time range of the charts: since the console started, or hours from Prometheus; and the charts as a table.

const HISTORY_MS = 15000; // the console asks Prometheus once per step, which is 15 s at least
const TABLE_ROWS = 60;

const past = { hours: 0, url: "", asked: 0, document: null, problem: "" };

function hoursText(hours) {
  return hours === 1 ? "1 hour" : `${hours} hours`;
}

// Radio buttons, because one range is shown: arrow keys move between them.
function showRanges(hours) {
  byId("ranges").hidden = hours.length === 0;
  update("ranges", hours, () => [element("legend", { class: "hidden" }, "Time range of the charts"), ...[0, ...hours].map(rangeButton)]);
  const live = "Since the console started";
  setText(byId("span"), past.hours ? `The last ${hoursText(past.hours)}` : live);
  const how = "For the last hours, start the console with --prometheus URL.";
  const loading = past.hours && !past.document ? "Prometheus is being asked." : "";
  setText(byId("hint"), hours.length ? (past.hours && past.problem) || loading : how);
}

function rangeButton(hours) {
  const input = element("input", { type: "radio", name: "hours", value: hours, id: `hours-${hours}` });
  input.checked = hours === past.hours;
  input.addEventListener("change", () => {
    forgetHistory();
    past.hours = hours;
    render();
    pollHistory();
  });
  return element("label", { for: input.id }, input, element("span", {}, hours ? hoursText(hours) : "Live"));
}

function forgetHistory() {
  Object.assign(past, { asked: 0, document: null, problem: "" });
}

async function pollHistory() {
  const service = route();
  if (!service || !past.hours || Date.now() - past.asked < HISTORY_MS) return;
  const url = `history.json?${new URLSearchParams({ ...service, hours: past.hours })}`;
  past.asked = Date.now();
  past.url = url;
  let found = null, problem = "";
  try {
    const answer = await fetch(url, { cache: "no-store" });
    if (!answer.ok) throw new Error(`The console answered ${answer.status}.`);
    found = await answer.json();
    problem = found.problem && `No history: ${found.problem}`;
  } catch (failure) {
    problem = `No history: ${failure.message}`;
  }
  if (url !== past.url || !past.hours) return; // another range or service was chosen in the meantime
  if (found && !found.problem) past.document = found;
  past.problem = problem;
  if (state.document) render();
}

// What the charts show: {times, series, marks: [{time, text}]}. The status has the last decisions in words.
function shownData(service) {
  const words = service.changes.map((change) => ({ time: Date.parse(change.time) / 1000, text: change.text })).filter((mark) => !Number.isNaN(mark.time));
  if (!past.hours) return { times: service.times, series: service.series, marks: words };
  if (!past.document) return { times: [], series: {}, marks: [] };
  const oldest = Math.min(Infinity, ...words.map((mark) => mark.time));
  const { times, series, marks } = past.document;
  const earlier = marks.filter((mark) => mark.time < oldest).map((mark) => ({ time: mark.time, text: mark.what }));
  return { times, series, marks: [...earlier, ...words] };
}

// -- the charts as a table ------------------------------------------------------------------------

// The newest row first. Of many points, every second or later one is a row; no decision is left out.
function dataTable(charts, times, marks) {
  const columns = charts.flatMap((chart) => chart.lines.map((line) => ({ ...line, unit: chart.unit, label: chart.lines.length > 1 ? `${chart.title}: ${line.label}` : chart.title })));
  const stride = Math.max(1, Math.ceil(times.length / TABLE_ROWS));
  const rows = [];
  for (let index = times.length - 1, after = Infinity; index >= 0; index -= stride) {
    const decisions = marks.filter((mark) => mark.time >= times[index] && mark.time < after).map((mark) => mark.text);
    after = times[index];
    const figures = columns.map((column) => element("td", {}, figureText(column.values[index], column.unit)));
    rows.push(element("tr", {}, element("th", { scope: "row" }, clock(times[index])), ...figures, element("td", { class: "wide" }, decisions.join(", ") || "–")));
  }
  return table("The charts as a table, the newest values first", ["Time", ...columns.map((column) => column.label), "Decisions"], rows);
}

function showTable(charts, times, marks) {
  if (!byId("data").open) return;
  update("table", [charts, times, marks], () => [times.length ? dataTable(charts, times, marks) : element("p", { class: "empty" }, "There is no data yet.")]);
}
