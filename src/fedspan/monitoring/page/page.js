"use strict";
// The state is JSON from /state.json. All of it is shown as text, never as HTML: names and reasons come from others.
const INTERVAL = 1000;
const SILENCE = 60;  // seconds without a change of the progress after which they are shown
const WIDTH = 400, HEIGHT = 210, LEFT = 50, RIGHT = 14, TOP = 12, BOTTOM = 40;
const byId = (id) => document.getElementById(id);
let latest = null, drawn = {};

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
function show(element, isShown) {
  element.hidden = !isShown;
}
function create(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}
function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}
function formatNumber(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  return size >= 1000 || (size && size < 1e-3) ? value.toPrecision(3) : value.toFixed(4);
}
function formatScore(value, percent) {
  if (!isNumber(value)) return "–";
  return percent ? (100 * value).toFixed(1) + "%" : formatNumber(value);
}
function formatSize(bytes) {
  let unit = 0;
  while (bytes >= 1000 && unit < 4) { bytes /= 1000; unit += 1; }
  return (unit ? bytes.toPrecision(3) : String(bytes)) + " " + ["B", "kB", "MB", "GB", "TB"][unit];
}
function formatDuration(seconds) {
  const all = Math.max(0, Math.round(seconds)), rest = String(all % 60).padStart(2, "0");
  const minutes = Math.floor(all / 60) % 60, hours = Math.floor(all / 3600);
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}
function find(list, predicate) {
  for (let index = list.length - 1; index >= 0; index -= 1) if (predicate(list[index])) return list[index];
  return null;
}

function showHeader(state) {
  const run = state.run, title = run ? [run.method, run.model].filter(Boolean).join(" on ") : "No run yet";
  setText(byId("title"), title || "Run");
  setText(byId("subtitle"), run ? run.folder : state.folder);
  const word = run ? run.state : "waiting", badge = byId("state");
  setText(badge, word);
  badge.className = "state " + word;
  const done = run ? `${run.round}${run.rounds ? "/" + run.rounds : ""} ` : "";
  document.title = `${done}${word}: ${title}`;
  const alerts = [];
  if (run && run.state === "failed") alerts.push("The run failed: " + run.reason);
  if (run && run.state === "stopped") alerts.push("No process is working on this run. " + (run.reason || "It can be resumed") + ".");
  if (run && run.problem) alerts.push("The run's metrics cannot be read: " + run.problem);
  if (state.nodes && state.nodes.problem) alerts.push("The nodes cannot be listed: " + state.nodes.problem);
  showAlert(alerts.join(" "));
}

function showAlert(text) {
  setText(byId("alert"), text);
  show(byId("alert"), Boolean(text));
}

function showProgress(state) {
  const run = state.run, isRunning = Boolean(run) && run.state === "running";
  show(byId("progress"), isRunning);
  if (!isRunning) return;
  const stage = run.stage, parts = [];
  if (run.baseline) parts.push(`for comparison, ${run.baseline.name}: epoch ${run.baseline.round} of ${run.baseline.rounds}`);
  else if (run.current) parts.push(`round ${run.current} of ${run.rounds}`);
  // of clients on other machines, only whole replies are seen
  if (stage) parts.push(stage.text + (stage.total && stage.done ? `, ${Math.min(stage.done, stage.total)} of ${stage.total} ${stage.unit}` : ""));
  setText(byId("stage"), parts.join(": ") || "preparing");
  const within = isNumber(run.round_started) ? `${formatDuration(state.time - run.round_started)} in this round` : "";
  const silence = isNumber(run.updated) && state.time - run.updated >= SILENCE ? `no news for ${formatDuration(state.time - run.updated)}` : "";
  setText(byId("times"), [within, silence].filter(Boolean).join(", "));
  const share = stage && stage.total && stage.text === "training" ? Math.min(1, stage.done / stage.total) : 0;
  byId("bar").max = run.rounds || 1;
  byId("bar").value = Math.min(run.rounds || 1, run.round + share);
}

function showFacts(state) {
  const run = state.run, facts = [];
  if (state.nodes) facts.push(["nodes online", state.nodes.total === null ? "–" : `${state.nodes.online} of ${state.nodes.total}`,
    state.nodes.total === null ? "waiting for the server's list of nodes" : ""]);
  if (run) {
    const metric = run.metric, measured = find(run.curve, (point) => isNumber(point.score) || isNumber(point.validation));
    const lost = find(run.curve, (point) => isNumber(point.loss)), result = run.result;
    facts.push(["rounds", `${run.round}${run.rounds ? " of " + run.rounds : ""}`,
      isNumber(run.seconds) ? `in ${formatDuration(run.seconds)}` : ""]);
    if (result) facts.push([`${metric.title}, ${result.selected ? "best" : "last"} round`, formatScore(result.score, metric.percent), `round ${result.best_round}`]);
    else {
      const hasScore = Boolean(measured) && isNumber(measured.score), score = measured && (hasScore ? measured.score : measured.validation);
      facts.push([metric.title, formatScore(score, metric.percent),
        measured ? `${hasScore ? "" : "validation, "}after round ${measured.round}` : "not measured yet"]);
    }
    if (result && result.worst && isNumber(result.worst.score))
      facts.push(["worst client", formatScore(result.worst.score, metric.percent), result.worst.client]);
    facts.push(["training loss", formatNumber(lost && lost.loss), lost ? `round ${lost.round}` : ""]);
    facts.push(["training traffic", formatSize(run.bytes.down + run.bytes.up), `${formatSize(run.bytes.down)} down, ${formatSize(run.bytes.up)} up`]);
    if (run.privacy) facts.push(["epsilon spent", run.privacy.epsilon.toPrecision(3),
      (run.privacy.limit ? `of ${run.privacy.limit}, ` : "") + `${run.privacy.mechanism}, delta ${run.privacy.delta}`]);
    facts.push(["failures", String(run.failure_count), run.failure_count ? "reasons below" : "none so far"]);
  }
  const list = byId("facts"), text = JSON.stringify(facts);
  if (drawn.facts === text) return;
  drawn.facts = text;
  list.replaceChildren(...facts.map(([name, value, detail]) => {
    const card = create("div"), shown = create("dd", value);
    if (detail) shown.append(create("small", detail));
    card.append(create("dt", name), shown);
    return card;
  }));
  show(list, facts.length > 0);
}

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function computeTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough), ticks = [];
  if (!(step > 0) || low + step === low) return ticks;  // the values differ by less than numbers can express, or are infinite
  const first = Math.ceil(low / step - 1e-9);
  for (let index = 0; index <= 2 * count && (first + index) * step <= high + step * 1e-9; index += 1) ticks.push((first + index) * step);
  return ticks;
}

function drawChart(id, title, series, format, rounds) {
  const figure = byId(id), kept = series.filter(([, points]) => points.length);
  show(figure, kept.length > 0);
  const text = JSON.stringify([title, kept, rounds]);
  if (drawn[id] === text || !kept.length) return kept.length > 0;
  drawn[id] = text;
  const values = kept.flatMap(([, points]) => points.map((point) => point[1]));
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  low -= margin; high += margin;
  const first = Math.min(...kept.flatMap(([, points]) => points.map((point) => point[0])));
  const last = Math.max(rounds || 0, first + 1, ...kept.flatMap(([, points]) => points.map((point) => point[0])));
  const x = (round) => LEFT + (round - first) / (last - first) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const newest = kept.map(([name, points]) => `${name} ${format(points[points.length - 1][1])}`).join(", ");
  const picture = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by round; newest: ${newest}`});
  for (const tick of computeTicks(low, high, 4)) {
    picture.append(svg("line", {class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick)}));
    picture.append(svg("text", {x: LEFT - 6, y: y(tick) + 4.5, "text-anchor": "end"}, format(tick, true)));
  }
  for (const tick of computeTicks(first, last, 6).filter(Number.isInteger))
    picture.append(svg("text", {x: x(tick), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle"}, String(tick)));
  picture.append(svg("text", {x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle"}, "round"));
  const caption = create("figcaption"), legend = create("span");
  caption.append(create("strong", title), legend);
  kept.forEach(([name, points, style], index) => {
    picture.append(svg("polyline", {class: style, points: points.map(([round, value]) => `${x(round)},${y(value)}`).join(" ")}));
    const marked = points.length <= 40 ? points : points.slice(-1);
    for (const [round, value] of marked) {
      const dot = svg("circle", {class: style, cx: x(round), cy: y(value), r: 3});
      dot.append(svg("title", {}, `${name}, round ${round}: ${format(value)}`));
      picture.append(dot);
    }
    const newestValue = format(points[points.length - 1][1]);
    legend.append(index ? ", " : "", create("span", `${style === "first" ? "—" : "– –"} ${name} ${newestValue}`, `${style}-text`));
  });
  figure.replaceChildren(caption, picture);
  return true;
}

function showCharts(run) {
  const pick = (name) => run.curve.filter((point) => isNumber(point[name])).map((point) => [point.round, point[name]]);
  const percent = run.metric.percent;
  const formatTick = (value, isTick) => percent ? (isTick ? Number((100 * value).toPrecision(6)) : (100 * value).toFixed(1)) + "%" : isTick ? String(Number(value.toPrecision(3))) : formatNumber(value);
  const formatPlain = (value, isTick) => isTick ? String(Number(value.toPrecision(3))) : formatNumber(value);
  const formatShort = (value) => String(Number(value.toPrecision(3)));
  const drawnCharts = [
    drawChart("score", run.metric.title, [["test", pick("score"), "first"], ["validation", pick("validation"), "second"]], formatTick, run.rounds),
    drawChart("loss", "training loss", [["loss", pick("loss"), "first"]], formatPlain, run.rounds),
    drawChart("epsilon", "epsilon spent", [["epsilon", pick("epsilon"), "first"]], formatShort, run.rounds),
  ];
  show(byId("charts"), drawnCharts.some(Boolean));
}

function showClients(state) {
  const clients = state.clients, run = state.run, filter = byId("filter").value.trim().toLowerCase();
  show(byId("clients"), clients.length > 0);
  if (!clients.length) return;
  const hasNodes = Boolean(state.nodes), isRunning = Boolean(run) && run.state === "running";
  const failing = clients.some((client) => client.failures || client.last_failure), isLate = clients.some((client) => client.late);
  const columns = [hasNodes ? "node" : "client", ...(hasNodes ? ["status", "last seen"] : []), ...(isRunning ? ["this round", "loss"] : []),
    "rounds selected", ...(isLate ? ["late"] : []), ...(failing ? ["failures", "last failure"] : [])];
  const shown = clients.filter((client) => !filter || [client.name, client.status, client.node_status, client.last_failure && client.last_failure.reason]
    .some((text) => text && text.toLowerCase().includes(filter)));
  const replied = clients.filter((client) => client.status === "replied").length;
  const failed = clients.filter((client) => client.status === "failed").length;
  const selected = replied + failed + clients.filter((client) => client.status === "no reply yet").length;
  const total = run ? run.client_count || run.known_clients : clients.length, parts = [];
  if (isRunning && selected) parts.push(`${replied} of ${selected} selected replied` + (failed ? `, ${failed} failed` : ""));
  if (total) parts.push(`${total} in all`);
  if (clients.length < (run ? run.known_clients : 0)) parts.push(`${clients.length} listed`);
  if (filter) parts.push(`${shown.length} match`);
  setText(byId("count"), parts.join(", "));
  const text = JSON.stringify([columns, shown]);
  if (drawn.clients === text) return;
  drawn.clients = text;
  byId("head").replaceChildren(...columns.map((column) => {
    const cell = create("th", column);
    cell.scope = "col";
    return cell;
  }));
  byId("rows").replaceChildren(...shown.map((client) => {
    const row = create("tr"), name = create("th", client.name);
    name.scope = "row";
    row.append(name);
    if (hasNodes) row.append(create("td", client.node_status || "unknown", client.node_status + " short"), create("td", client.node_seen || "", "short"));
    if (isRunning) row.append(create("td", (client.status === "no reply yet" && client.node_work) || client.status || "–", ({replied: "replied ", failed: "bad "}[client.status] || "") + "short"), create("td", formatNumber(client.loss), "short"));
    row.append(create("td", String(client.rounds)));
    if (isLate) row.append(create("td", String(client.late)));
    if (failing) {
      const failure = client.last_failure;
      row.append(create("td", String(client.failures), client.failures ? "bad" : ""),
        create("td", failure ? `round ${failure.round}: ${failure.reason}` : "", "reason"));
    }
    return row;
  }));
}

function showLists(run) {
  show(byId("failures"), Boolean(run) && run.failures.length > 0);
  show(byId("notes"), Boolean(run) && run.notes.length > 0);
  if (!run) return;
  const text = JSON.stringify([run.failures, run.notes]);
  if (drawn.lists === text) return;
  drawn.lists = text;
  setText(byId("failed"), run.failure_count > run.failures.length ? `newest ${run.failures.length} of ${run.failure_count}` : `${run.failure_count}, newest first`);
  byId("reasons").replaceChildren(...run.failures.map((failure) => {
    const row = create("tr");
    row.append(create("td", String(failure.round)), create("td", failure.client, "name"), create("td", failure.reason, "reason"));
    return row;
  }));
  byId("lines").replaceChildren(...run.notes.map((note) => create("li", note)));
}

function showState(state) {
  latest = state;
  showHeader(state);
  showProgress(state);
  showFacts(state);
  show(byId("charts"), Boolean(state.run));
  if (state.run) showCharts(state.run);
  showClients(state);
  showLists(state.run);
  setText(byId("updated"), "Updated " + new Date(1000 * state.time).toLocaleTimeString() + ".");
}

function showUnreachable(text) {
  const badge = byId("state");
  setText(badge, "unreachable");
  badge.className = "state unreachable";
  showAlert(text);
}

async function update() {
  if (document.hidden) return;
  try {
    const response = await fetch("/state.json", {cache: "no-store", signal: AbortSignal.timeout(10000)});
    if (response.status === 401) showUnreachable("The page was started again: open the address that it printed.");
    else if (!response.ok) showUnreachable("The page's server reports an error.");
    else {
      const state = await response.json();
      if (state.problem) showUnreachable("The state of the run cannot be read: " + state.problem);
      else showState(state);
    }
  } catch {
    showUnreachable("The page's server does not answer. What is shown may be out of date.");
  }
}

async function run() {
  await update();
  setTimeout(run, INTERVAL);
}

byId("filter").addEventListener("input", () => latest && showClients(latest));
document.addEventListener("visibilitychange", update);
run();
