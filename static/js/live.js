// The live page: one EngineView, one socket, one paint loop. Taking in messages never waits for painting.

import { Announcer } from "./announcer.js";
import { BatchStrip } from "./batch_strip.js";
import { BlockGrid } from "./block_grid.js";
import { ConnectionView } from "./connection.js";
import { formatCount } from "./format.js";
import { GridInput } from "./grid_input.js";
import { bindKeys } from "./keyboard.js";
import { MarkCursor } from "./mark_cursor.js";
import { PaintLoop } from "./paint_loop.js";
import { STATES, SlotStyles, css, slotRgb } from "./palette.js";
import { EngineView } from "./reducer.js";
import { RequestList } from "./request_list.js";
import { StatusBar } from "./status_bar.js";
import { EngineStream } from "./stream.js";
import { bindTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { MARK } from "./wire.js";

const STATUS_MS = 200;
const LABEL_MS = 10_000;
const SECOND_MS = 1000;
const IDLE_REFRESH_MS = 5000;
const ENDINGS = [MARK.FINISH, MARK.ABORT, MARK.PREEMPT, MARK.RESET];

const byId = (id) => document.getElementById(id);

const view = new EngineView();
const grid = new BlockGrid(byId("grid"), view);
const batchStrip = new BatchStrip(byId("batch"), view);
const timeline = new Timeline(byId("timeline"), view);
const statusBar = new StatusBar(view, batchStrip);
const connection = new ConnectionView(view, byId("banner"), byId("connection-text"));
const announcer = new Announcer(byId("announcer"));
const slotStyles = new SlotStyles();
const requests = new RequestList(byId("requests"), view, select);
const markCursor = new MarkCursor();
const loop = new PaintLoop(paint, (fps) => stream.setFps(fps));
const stream = new EngineStream(view, { onchange, onstatus });
const input = new GridInput(grid, byId("tooltip"), {
  repaint: () => loop.request(),
  select,
  announce: (text) => announcer.say(text),
  nameOf: (slot) => requests.nameOf(slot),
});

const pace = { behind: 0, stepsPerFrame: 0, quietMs: 0, limitText: "", numWatching: 0 };
let session = "";
let paintedStep = -1;
let framesWithSteps = 0;
let stepsInFrames = 0;
let newestStepAt = -Infinity;
let refreshedAt = -Infinity;
let statusWrittenAt = -Infinity;
let labelWrittenAt = -Infinity;
let statusTimer = 0;
let isLive = false; // steps and charts are worth painting: the engine is there
let theme = null;

// ---- what comes in ----

function onchange({ changed, hello, lastStep }) {
  if (hello) takeHello();
  if (lastStep !== paintedStep) newestStepAt = performance.now();
  grid.update(changed);
  timeline.update();
  takeMarks();
  refreshPanels();
  loop.request();
}

/** Have the server's part of the page fetched anew; the page limits how often. */
function refreshPanels() {
  refreshedAt = performance.now();
  document.body.dispatchEvent(new CustomEvent("engine:tick"));
}

function takeHello() {
  if (view.session !== session) startOver();
  isLive = view.numBlocks > 0;
  grid.resize();
  if (theme) slotStyles.update(theme, view.hello.config?.max_num_seqs ?? 0);
  if (view.model) byId("model-name").textContent = view.model;
  if (isLive) byId("grid-caption").textContent = `${formatCount(view.numBlocks)} blocks of ${view.blockSize} tokens, by block id`;
  connection.update();
  document.body.dispatchEvent(new CustomEvent("engine:status"));
}

/** Another server run: steps count from 1 again, and slots belong to others. */
function startOver() {
  session = view.session;
  paintedStep = -1;
  if (grid.selectedSlot >= 0) select(-1);
}

function takeMarks() {
  const marks = markCursor.take(view);
  announcer.count(marks);
  const { selectedSlot } = grid;
  if (selectedSlot < 0) return;
  const ended = marks.some(({ kind, slot }) => ENDINGS.includes(kind) && (slot === selectedSlot || kind === MARK.RESET));
  if (ended) select(-1); // the slot may belong to somebody else from now on
}

function onstatus(status) {
  connection.update(status);
  loop.request();
}

// ---- painting ----

function paint(now) {
  if (!theme) return false;
  const isFading = grid.paint(now);
  batchStrip.paint();
  timeline.paint();
  statusBar.writeFrame();
  input.updateTooltip();
  if (view.step > paintedStep && paintedStep >= 0) {
    stepsInFrames += view.step - paintedStep;
    framesWithSteps++;
  }
  paintedStep = view.step;
  stream.painted();
  if (now - statusWrittenAt >= STATUS_MS) writeStatus(now);
  else statusTimer ||= setTimeout(() => loop.request(), STATUS_MS);
  return isFading;
}

function writeStatus(now) {
  statusWrittenAt = now;
  clearTimeout(statusTimer);
  statusTimer = 0;
  pace.behind = Math.max(0, Number(byId("engine-step").value) - paintedStep); // the server says once a second where it is
  pace.numWatching = Number(byId("num-watching").value);
  pace.quietMs = performance.now() - newestStepAt;
  pace.limitText = loop.fps < 60 ? `at most ${loop.fps} frames/s` : "";
  if (framesWithSteps > 0) pace.stepsPerFrame = stepsInFrames / framesWithSteps;
  framesWithSteps = stepsInFrames = 0;
  statusBar.write(pace);
  const caption = timeline.describeHover() || timeline.scaleText;
  if (byId("timeline-caption").textContent !== caption) byId("timeline-caption").textContent = caption;
  if (isLive && now - labelWrittenAt >= LABEL_MS) writeLabels(now);
}

/** What the pictures say, in a sentence, for those who do not see them. */
function writeLabels(now) {
  labelWrittenAt = now;
  const used = byId("stat-kv").textContent;
  const running = byId("stat-running").textContent;
  const waiting = byId("stat-waiting").textContent;
  grid.canvas.setAttribute("aria-label", `${used} of ${formatCount(view.numBlocks)} KV blocks in use, requests: ${running} running, ${waiting} waiting, step ${formatCount(Math.max(0, view.step))}`);
  batchStrip.canvas.setAttribute("aria-label", `${byId("batch-tokens").textContent} ${byId("batch-tokens-of").textContent}; ${byId("batch-seqs").textContent} ${byId("batch-seqs-of").textContent}`);
  timeline.canvas.setAttribute("aria-label", `The newest ${formatCount(view.steps.length)} steps up to ${formatCount(Math.max(0, view.step))}: KV blocks, batch tokens, requests, step time and events`);
}

// ---- what people do ----

function select(slot) {
  grid.select(slot);
  batchStrip.selectedSlot = slot;
  requests.select(slot);
  if (slot >= 0) announcer.say(`Lit up: ${requests.nameOf(slot) || "request"} in slot ${slot}`);
  loop.request();
}

function setMode(mode) {
  grid.setMode(mode);
  byId("legend").classList.toggle("by-request", mode === "request");
  for (const button of document.querySelectorAll("[data-mode]")) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  loop.request();
}

function showOnly(state) {
  const next = state === grid.onlyState ? -1 : state;
  grid.showOnly(next);
  for (const button of statusBar.legend) button.setAttribute("aria-pressed", String(Number(button.dataset.state) === next));
  loop.request();
}

function clearSelection() {
  select(-1);
  showOnly(-1);
}

function toggleTables() {
  const tables = byId("tables");
  tables.hidden = !tables.hidden;
  byId("table-button").setAttribute("aria-pressed", String(!tables.hidden));
  if (!tables.hidden) tables.dispatchEvent(new CustomEvent("tables:show"));
}

function zoomTimeline(by) {
  if (timeline.zoom(by)) statusWrittenAt = -Infinity;
  loop.request();
}

function onTheme(next) {
  theme = next;
  grid.setTheme(theme);
  batchStrip.theme = timeline.theme = theme;
  slotStyles.update(theme, view.hello?.config?.max_num_seqs ?? 0);
  ["a", "b", "c"].forEach((name, slot) => byId("legend").style.setProperty(`--slot-${name}`, css(slotRgb(slot, theme.light))));
  if (theme.forced) setMode("state"); // owner colours are not the system's colours
  loop.request();
}

function bindTimeline() {
  const { canvas } = timeline;
  const hover = (x) => {
    timeline.hoverX = x;
    statusWrittenAt = -Infinity;
    loop.request();
  };
  canvas.addEventListener("pointermove", (event) => hover(event.offsetX * timeline.ratio));
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault();
    zoomTimeline(event.deltaY < 0 ? 1 : -1);
  }, { passive: false });
  byId("zoom-in").addEventListener("click", () => zoomTimeline(1));
  byId("zoom-out").addEventListener("click", () => zoomTimeline(-1));
}

function bindControls() {
  const dialog = byId("keys-dialog");
  const flipTheme = bindTheme({ button: byId("theme-button"), select: byId("theme-select"), onchange: onTheme });
  const help = () => dialog.showModal();
  byId("keys-button").addEventListener("click", help);
  byId("fit-button").addEventListener("click", () => input.fit());
  byId("table-button").addEventListener("click", toggleTables);
  for (const button of document.querySelectorAll("[data-mode]")) button.addEventListener("click", () => setMode(button.dataset.mode));
  for (const button of statusBar.legend) button.addEventListener("click", () => showOnly(Number(button.dataset.state)));
  bindKeys({
    KeyC: () => setMode(grid.mode === "request" ? "state" : "request"),
    Digit0: () => input.fit(),
    KeyW: () => zoomTimeline(1),
    KeyS: () => zoomTimeline(-1),
    KeyT: flipTheme,
  }, { help, escape: clearSelection, toggle: byId("single-keys") });
  bindTimeline();
}

function everySecond() {
  connection.update();
  announcer.tellNews(performance.now());
  // Nothing comes from an idle engine, but other pages come and go.
  const isQuiet = performance.now() - refreshedAt >= IDLE_REFRESH_MS;
  if (isQuiet && stream.status.connected && !stream.hidden) refreshPanels();
  const tables = byId("tables");
  if (!tables.hidden) tables.dispatchEvent(new CustomEvent("tables:tick"));
  loop.request();
}

function start() {
  const resizer = new ResizeObserver(() => {
    for (const part of [grid, batchStrip, timeline]) part.resize();
    loop.request();
  });
  for (const part of [grid, batchStrip, timeline]) resizer.observe(part.canvas);
  setMode("request");
  bindControls();
  document.addEventListener("visibilitychange", () => loop.request());
  setInterval(everySecond, SECOND_MS);
  stream.start();
}

start();

/** For tests and the console: what the page knows, and what its canvas really shows. */
window.pageglass = Object.freeze({
  view,
  grid: Object.freeze({
    cellRect: (id) => grid.cellRect(id),
    pixel: (id) => grid.pixel(id),
    colorOf: (stateName, slot) => grid.colorOf(STATES.indexOf(stateName), slot),
  }),
  get paintedStep() {
    return paintedStep;
  },
});
