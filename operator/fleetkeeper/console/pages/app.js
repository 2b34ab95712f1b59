"use strict";
// The two views. Data comes as JSON; every text is set with textContent, so no value becomes markup.

const POLL_MS = 2000;
const NEW_S = 20; // without a sample for this time, the age is shown as a warning

const COLUMNS = [
  { id: "name", label: "Service", sort: (row) => row.name },
  { id: "namespace", label: "Namespace", sort: (row) => row.namespace },
  { id: "state", label: "Ready", sort: (row) => ["bad", "warn", "good"].indexOf(row.tone) },
  { id: "replicas", label: "Replicas", hint: "ready / wanted / max", sort: (row) => Number(row.readyReplicas) || 0, isHighFirst: true },
  { id: "wait", label: "Queue wait", hint: "now / objective", sort: (row) => row.queueWait.value ?? -1, isHighFirst: true },
  { id: "batch", label: "Batch time", hint: "now / objective", sort: (row) => row.batchTime.value ?? -1, isHighFirst: true },
  { id: "limits", label: "Limits", hint: "sequences / tokens", sort: (row) => Number(row.sequences) || 0, isHighFirst: true },
  { id: "breaker", label: "Breaker", sort: (row) => row.breaker },
  { id: "limited", label: "Limited by", sort: (row) => row.limitedBy || "~" },
  { id: "message", label: "Message", sort: (row) => row.message || "~" },
];

const state = { etag: "", url: "", document: null, sort: "", isDescending: false, connection: "" };
const shown = new Map(); // by id: what a part of the page was last built from
const byId = (id) => document.getElementById(id);

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Build a part again only if its data changed: selections, focus and scroll positions stay.
function update(id, data, build) {
  const text = JSON.stringify(data);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  byId(id).replaceChildren(...build());
}

function ageText(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]]) {
    if (whole >= length) return `${Math.floor(whole / length)}${unit}`;
  }
  return `${whole}s`;
}

function age(time, after) {
  const node = element("time", { datetime: time, title: time });
  node.dataset.after = after || "";
  showAge(node);
  return node;
}

function showAge(node) {
  const then = Date.parse(node.dateTime) / 1000;
  setText(node, Number.isNaN(then) ? "–" : `${ageText(Date.now() / 1000 - then)}${node.dataset.after}`);
}

function badge(text, tone) {
  return element("span", { class: `badge ${tone}` }, text);
}

// -- which view -----------------------------------------------------------------------------------

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  if (parts.length !== 2) return null;
  try {
    return { namespace: decodeURIComponent(parts[0]), name: decodeURIComponent(parts[1]) };
  } catch {
    return null;
  }
}

function address(row) {
  return `#/${encodeURIComponent(row.namespace)}/${encodeURIComponent(row.name)}`;
}

function showView(isFocused) {
  const service = route();
  byId("fleet").hidden = service !== null;
  byId("service").hidden = service === null;
  document.title = service ? `${service.namespace}/${service.name} – Fleetkeeper` : "Fleet – Fleetkeeper";
  state.url = service ? `service.json?${new URLSearchParams(service)}` : "fleet.json";
  state.etag = "";
  state.document = null;
  if (service) {
    setText(byId("service-title"), service.name);
    setText(byId("crumb"), service.namespace);
    byId("details").hidden = true;
    byId("gone").hidden = true;
    setText(byId("headline"), "");
    byId("badge").replaceChildren();
    shown.clear();
    forgetHistory();
  }
  if (isFocused) {
    byId(service ? "service-title" : "fleet-title").focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }
  poll();
}

// -- data -----------------------------------------------------------------------------------------

async function poll() {
  const url = state.url;
  try {
    const answer = await fetch(url, { headers: state.etag ? { "If-None-Match": state.etag } : {}, cache: "no-store" });
    if (url !== state.url) return;
    if (answer.status === 403) throw new Error("The session of this page has ended. Start fleetkeeper console again and open its new link.");
    if (!answer.ok && answer.status !== 304) throw new Error(`The console answered ${answer.status}.`);
    state.connection = "";
    if (answer.status !== 304) {
      state.document = await answer.json();
      if (url !== state.url) return;
      state.etag = answer.headers.get("ETag") || "";
      render();
    }
  } catch (problem) {
    if (url !== state.url) return;
    state.connection = problem instanceof TypeError
      ? "fleetkeeper console does not answer. The page shows its last data. Start the command again and open its new link."
      : problem.message;
  }
  showNotice();
  showFresh();
  pollHistory();
}

function showNotice() {
  const { problem, remark } = state.document || {};
  const text = state.connection || (problem ? `No new data: ${problem}` : remark || "");
  byId("notice").className = `notice ${state.connection || problem ? "bad" : "warn"}`;
  setText(byId("notice"), text);
}

function showFresh() {
  for (const node of document.querySelectorAll("time")) showAge(node);
  const taken = state.document ? state.document.taken : null;
  const seconds = taken === null ? null : Date.now() / 1000 - taken;
  setText(byId("fresh"), seconds === null ? "waiting for the first sample" : `data ${ageText(seconds)} old`);
  const isOld = seconds === null || seconds > NEW_S || Boolean(state.connection || state.document.problem);
  byId("fresh").classList.toggle("old", isOld);
}

function render() {
  if (route()) renderService(state.document.service);
  else renderFleet(state.document.services);
}

// -- the fleet ------------------------------------------------------------------------------------

function buildColumns() {
  for (const column of COLUMNS) {
    const button = element("button", { type: "button" }, column.label, element("span", { class: "arrow", "aria-hidden": "true" }));
    if (column.hint) button.append(element("small", {}, column.hint));
    button.addEventListener("click", () => {
      state.isDescending = state.sort === column.id ? !state.isDescending : Boolean(column.isHighFirst);
      state.sort = column.id;
      render();
    });
    byId("columns").append(element("th", { scope: "col", role: "columnheader", id: `column-${column.id}` }, button));
  }
}

function sorted(rows) {
  const column = COLUMNS.find((each) => each.id === state.sort);
  for (const each of COLUMNS) {
    const direction = each !== column ? "none" : state.isDescending ? "descending" : "ascending";
    byId(`column-${each.id}`).setAttribute("aria-sort", direction);
  }
  if (!column) return rows;
  const sign = state.isDescending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [column.sort(one), column.sort(other)];
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
  });
}

function isWanted(row) {
  if (byId("troubled").checked && row.tone === "good") return false;
  const text = [row.namespace, row.name, row.ready, row.breaker, row.limitedBy, row.message].join(" ").toLowerCase();
  return byId("filter").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function renderFleet(services) {
  const rows = sorted(services.filter(isWanted));
  const troubled = services.filter((row) => row.tone !== "good").length;
  const filtered = rows.length === services.length ? "" : `${rows.length} shown of `;
  setText(byId("counts"), `${filtered}${services.length} services, ${troubled || "none"} with problems`);
  const focused = document.activeElement && document.activeElement.id;
  update("rows", rows, () => rows.map(fleetRow));
  if (focused && document.activeElement === document.body) byId(focused)?.focus({ preventScroll: true });
  byId("empty").hidden = rows.length > 0;
  const none = state.document.taken === null ? "There is no data yet." : "no InferenceServices found";
  setText(byId("empty"), services.length ? "No service matches the filter." : none);
}

function fleetRow(row) {
  const cell = (id, ...children) => {
    const { label } = COLUMNS.find((column) => column.id === id);
    return element("td", { role: "cell", class: id, "data-label": label }, ...children);
  };
  const link = element("a", { href: address(row), id: `open ${row.namespace}/${row.name}` },
    row.simulated ? `${row.name} (simulated)` : row.name);
  return element("tr", { role: "row", class: row.tone },
    element("th", { scope: "row", role: "rowheader", class: "name" }, link),
    cell("namespace", row.namespace),
    cell("state", badge(row.ready, row.tone)),
    cell("replicas", `${row.readyReplicas} / ${row.wanted} / ${row.maxReplicas ?? "–"}`),
    cell("wait", measured(row.queueWait)),
    cell("batch", measured(row.batchTime)),
    cell("limits", `${row.sequences} / ${row.tokens}`),
    cell("breaker", row.breakerTone === "good" ? row.breaker : badge(row.breaker, row.breakerTone)),
    cell("limited", row.limitedBy || "–"),
    cell("message", row.message || "–"));
}

// The figure with a bar up to the objective. Above it, the words say so, not only the color.
function measured(value) {
  const node = element("span", { class: value.broken ? "measured broken" : "measured" }, value.text);
  if (value.broken) node.append(element("span", { class: "hidden" }, " above the objective"));
  if (value.value !== null && value.objective) {
    const fill = element("span", {});
    fill.style.width = `${Math.min(100, (100 * value.value) / value.objective)}%`;
    node.append(element("span", { class: "bar", "aria-hidden": "true" }, fill));
  }
  return node;
}

// -- a service ------------------------------------------------------------------------------------

function renderService(service) {
  byId("details").hidden = service === null;
  byId("gone").hidden = service !== null;
  if (service === null) {
    const { namespace, name } = route();
    const why = state.document.taken === null ? "There is no data yet." : `InferenceService ${name} was not found in namespace ${namespace}.`;
    setText(byId("gone"), why);
    setText(byId("headline"), "");
    byId("badge").replaceChildren();
    return;
  }
  update("badge", [service.ready, service.tone], () => [badge(service.ready, service.tone)]);
  setText(byId("headline"), service.readyMessage);
  renderTiles(service);
  renderProblems(service.problems);
  renderCharts(service);
  update("state", service.state, () => pairs(service.state));
  update("measurements", service.measurements, () => pairs(service.measurements));
  update("breakers", service.breakers, () => service.breakers.map((breaker) =>
    element("li", { class: breaker.tone }, element("b", {}, breaker.title), element("span", {}, breaker.text))));
  update("changes", service.changes, () => changes(service.changes));
  update("replicas", [service.replicaStates, service.unlistedReplicas], () => replicaTable(service));
  update("conditions", service.conditions, () => [conditionTable(service.conditions)]);
}

function pairs(rows) {
  return rows.map(([title, text]) => element("div", {}, element("dt", {}, title), element("dd", {}, text)));
}

function renderTiles(service) {
  const tiles = [
    ["Replicas", `${service.readyReplicas} / ${service.wanted} / ${service.maxReplicas ?? "–"}`, "ready / wanted / max"],
    ["Queue wait", measured(service.queueWait), "now / objective"],
    ["Batch time", measured(service.batchTime), "now / objective"],
    ["TTFT / ITL", `${service.ttft} / ${service.itl}`, "means of streamed answers"],
    ["Limits", `${service.sequences} / ${service.tokens}`, "sequences / tokens"],
    ["Limited by", service.limitedBy || "–", "what stops more replicas"],
  ];
  const data = [service.readyReplicas, service.wanted, service.maxReplicas, service.queueWait, service.batchTime,
    service.ttft, service.itl, service.sequences, service.tokens, service.limitedBy];
  update("tiles", data, () => tiles.map(([title, value, hint]) =>
    element("div", { class: "card tile" }, element("h2", {}, title), element("p", {}, value), element("small", {}, hint))));
}

function renderProblems(problems) {
  byId("problems").hidden = problems.length === 0;
  byId("problems").querySelector("dl").replaceChildren(...pairs(problems));
}

function renderCharts(service) {
  showRanges(state.document.hours);
  const { series, times, marks } = shownData(service);
  const line = (label, values, isStep) => ({ label, values: values || [], isStep });
  const charts = [
    { title: "Queue wait", unit: "ms", lines: [line("Queue wait", series.queueWait, false)], limit: service.queueWait.objective, limits: series.queueWaitObjective, limitLabel: "objective" },
    { title: "Batch time", unit: "ms", lines: [line("Batch time", series.batchTime, false)], limit: service.batchTime.objective, limits: series.batchTimeObjective, limitLabel: "objective" },
    { title: "Replicas", unit: "", lines: [line("ready", series.ready, true), line("wanted", series.wanted, true)], limit: service.maxReplicas, limits: series.maxReplicas, limitLabel: "max" },
    { title: "Limit of sequences", unit: "", lines: [line("Limit of sequences", series.sequences, true)], limit: null },
    { title: "Limit of tokens", unit: "", lines: [line("Limit of tokens", series.tokens, true)], limit: null },
  ];
  if (series.refused) {
    charts.splice(2, 0, { title: "Requests", unit: "/s", lines: [line("arriving", series.arriving, false), line("refused", series.refused, false)], limit: null });
  }
  if (series.memory && series.memory.some((value) => value !== null)) {
    charts.push({ title: "Memory peak", unit: "%", lines: [line("Memory peak", series.memory, true)], limit: service.capPercent, limitLabel: "cap" });
  }
  const space = byId("charts");
  const count = Math.max(1, Math.min(3, Math.floor((space.clientWidth + 14) / 344)));
  const width = Math.max(230, Math.floor((space.clientWidth - (count - 1) * 14) / count) - 34);
  update("charts", [charts, times, marks, width], () => charts.map((chart) => chartFigure({ ...chart, times, marks }, width)));
  showTable(charts, times, marks);
}

function changes(rows) {
  if (!rows.length) return [element("li", { class: "none" }, "no decision yet")];
  return rows.map((row) => element("li", { class: row.what }, age(row.time, " ago"), element("span", {}, row.text)));
}

function table(captionText, headings, rows) {
  const head = element("tr", {}, ...headings.map((heading) => element("th", { scope: "col" }, heading)));
  return element("table", {}, element("caption", { class: "hidden" }, captionText), element("thead", {}, head), element("tbody", {}, ...rows));
}

function replicaTable(service) {
  if (!service.replicaStates.length) return [element("p", { class: "empty" }, "The status lists no replicas.")];
  const rows = service.replicaStates.map((replica) => {
    const stage = badge(replica.stage, replica.tone);
    stage.title = replica.stageText;
    return element("tr", {}, element("th", { scope: "row" }, replica.name), element("td", {}, stage),
      element("td", {}, age(replica.since)), element("td", {}, replica.node || "–"), element("td", {}, replica.reason || "–"));
  });
  const more = service.unlistedReplicas ? [element("p", {}, `${service.unlistedReplicas} more are not listed.`)] : [];
  return [table("States of the replicas", ["Replica", "Stage", "For", "Node", "Reason"], rows), ...more];
}

function conditionTable(conditions) {
  const rows = conditions.map((condition) => element("tr", {}, element("th", { scope: "row" }, condition.type),
    element("td", {}, badge(condition.status, condition.tone)), element("td", {}, condition.reason),
    element("td", {}, age(condition.since)), element("td", { class: "wide" }, condition.message || "–")));
  return table("Conditions of the service", ["Condition", "Status", "Reason", "For", "Message"], rows);
}

// -- start ----------------------------------------------------------------------------------------

buildColumns();
byId("filter").addEventListener("input", () => state.document && render());
byId("troubled").addEventListener("change", () => state.document && render());
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the view
  byId("main").focus();
});
byId("data").addEventListener("toggle", () => state.document && render());
window.addEventListener("hashchange", () => showView(true));
window.addEventListener("resize", () => state.document && render());
document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(() => document.hidden || poll(), POLL_MS);
setInterval(showFresh, 1000);
showView(false);
