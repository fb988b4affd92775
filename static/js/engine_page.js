// The engine view of a page: one EngineView, one source of messages, one paint loop. The source is the live socket or a
// recording; everything here is the same for both. Taking in messages never waits for painting.

import { Announcer } from "./announcer.js";
import { BatchStrip } from "./batch_strip.js";
import { BlockGrid } from "./block_grid.js";
import { ConnectionView } from "./connection.js";
import { Drawer, newestPreemption } from "./drawer.js";
import { formatCount } from "./format.js";
import { GridInput } from "./grid_input.js";
import { bindKeys } from "./keyboard.js";
import { MarkCursor } from "./mark_cursor.js";
import { PaintLoop } from "./paint_loop.js";
import { STATES, SlotStyles, css, inkOn, slotRgb } from "./palette.js";
import { EngineView } from "./reducer.js";
import { RequestList } from "./request_list.js";
import { StatusBar } from "./status_bar.js";
import { bindTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { MARK } from "./wire.js";

const STATUS_MS = 200;
const LABEL_MS = 10_000;
const SECOND_MS = 1000;
const ENDINGS = [MARK.FINISH, MARK.ABORT, MARK.PREEMPT, MARK.RESET];

const byId = (id) => document.getElementById(id);

/**
 * Usage: `new EnginePage({ makeSource })`, then `start()`.
 *
 * - `makeSource(view, {onchange, onstatus})` returns the source: `start()`, `painted()`, `setFps(fps)`, `hidden`,
 *   `status`; listeners as those of `EngineStream`
 * - `refreshPanels(view)`: have the server's part of the page fetched anew, called with every message
 * - `onmove(change)`: the view has taken a message, and the page with it
 * - `onpick(slot)`: a person lit up a slot, or put out the light (-1)
 * - `everySecond(page)`: called once a second
 * - `writePace(page)`: writes how the view keeps up, a few times a second; returns the token rates to show:
 *   {prefill, decode} per second
 * - `describeOutage`: words of the banner, as in connection.js
 * - `ontheme(theme)`: the colours have changed
 * - `keys()`, `steps()`: further keys, as in keyboard.js
 */
export class EnginePage {
  #options;
  #session = "";
  #statusWrittenAt = -Infinity;
  #labelWrittenAt = -Infinity;
  #statusTimer = 0;
  #isOpen = false; // steps and charts are worth painting: the engine is there
  #theme = null;
  #markCursor = new MarkCursor();
  #slotStyles = new SlotStyles();

  constructor(options) {
    this.#options = { onmove() {}, onpick() {}, everySecond() {}, ontheme() {}, keys: () => ({}), steps: () => ({}), ...options };
    const view = (this.view = new EngineView());
    this.paintedStep = -1;
    this.framesWithSteps = 0;
    this.stepsInFrames = 0;
    this.grid = new BlockGrid(byId("grid"), view);
    this.batchStrip = new BatchStrip(byId("batch"), view);
    this.timeline = new Timeline(byId("timeline"), view);
    this.statusBar = new StatusBar(view, this.batchStrip);
    this.connection = new ConnectionView(view, byId("banner"), byId("connection-text"), options.describeOutage);
    this.announcer = new Announcer(byId("announcer"));
    this.drawer = new Drawer(byId("drawer"));
    this.requests = new RequestList(byId("requests"), view, (slot) => this.#pick(slot));
    this.loop = new PaintLoop((now) => this.#paint(now), (fps) => this.source.setFps(fps));
    this.source = options.makeSource(view, {
      onchange: (change) => this.#onchange(change),
      onstatus: (status) => this.#onstatus(status),
    });
    this.input = new GridInput(this.grid, byId("tooltip"), {
      repaint: () => this.repaint(),
      select: (slot) => this.#pick(slot),
      announce: (text) => this.announcer.say(text),
      nameOf: (slot) => this.requests.nameOf(slot),
    });
  }

  start() {
    const resizer = new ResizeObserver(() => {
      for (const part of this.#pictures) part.resize();
      this.#draw(performance.now()); // at once: a canvas of another size is empty, and this frame shows it
      this.repaint();
    });
    for (const part of this.#pictures) resizer.observe(part.canvas);
    this.setMode("request");
    this.#bindControls();
    document.addEventListener("visibilitychange", () => this.repaint());
    setInterval(() => this.#everySecond(), SECOND_MS);
    this.source.start();
  }

  repaint() {
    this.loop.request();
  }

  get #pictures() {
    return [this.grid, this.batchStrip, this.timeline];
  }

  // ---- what comes in ----

  #onchange(change) {
    if (change.hello) this.#takeHello();
    this.grid.update(change.changed);
    this.timeline.update();
    this.#takeMarks();
    this.#options.onmove(change);
    this.#options.refreshPanels(this.view);
    this.repaint();
  }

  #takeHello() {
    const { view } = this;
    if (view.session !== this.#session) this.#startOver();
    this.#isOpen = view.numBlocks > 0;
    this.grid.resize();
    if (this.#theme) this.#slotStyles.update(this.#theme, view.hello.config?.max_num_seqs ?? 0);
    if (view.model) byId("model-name").textContent = view.model;
    this.statusBar.writeEngine();
    byId("legend").style.setProperty("--count-width", `${formatCount(view.numBlocks).length}ch`);
    if (this.#isOpen) byId("grid-caption").textContent = `${formatCount(view.numBlocks)} blocks of ${view.blockSize} tokens, by block id`;
    this.connection.update();
    document.body.dispatchEvent(new CustomEvent("engine:status"));
  }

  /** Another server run: steps count from 1 again, and slots belong to others. */
  #startOver() {
    this.#session = this.view.session;
    this.drawer.close(); // it speaks of steps of the run before
    for (const link of document.querySelectorAll(".replay-link")) link.href = `/s/${encodeURIComponent(this.#session)}`;
    this.paintedStep = -1;
    if (this.grid.selectedSlot >= 0) this.select(-1);
  }

  #takeMarks() {
    const marks = this.#markCursor.take(this.view);
    this.announcer.count(marks);
    const { selectedSlot } = this.grid;
    if (selectedSlot < 0) return;
    const ended = marks.some(({ kind, slot }) => ENDINGS.includes(kind) && (slot === selectedSlot || kind === MARK.RESET));
    if (ended) this.select(-1); // the slot may belong to somebody else from now on
  }

  #onstatus(status) {
    this.connection.update(status);
    this.repaint();
  }

  // ---- painting ----

  #paint(now) {
    if (!this.#theme) return false;
    const { view } = this;
    const isFading = this.#draw(now);
    this.statusBar.writeFrame();
    this.input.updateTooltip();
    if (view.step > this.paintedStep && this.paintedStep >= 0) {
      this.stepsInFrames += view.step - this.paintedStep;
      this.framesWithSteps++;
    }
    this.paintedStep = view.step;
    this.source.painted();
    if (now - this.#statusWrittenAt >= STATUS_MS) this.#writeStatus(now);
    else this.#statusTimer ||= setTimeout(() => this.repaint(), STATUS_MS);
    return isFading;
  }

  /** Draw the pictures alone. Returns whether something still fades. */
  #draw(now) {
    if (!this.#theme) return false;
    const isFading = this.grid.paint(now);
    this.batchStrip.paint();
    this.timeline.paint();
    return isFading;
  }

  #writeStatus(now) {
    this.#statusWrittenAt = now;
    clearTimeout(this.#statusTimer);
    this.#statusTimer = 0;
    this.statusBar.write(this.#options.writePace(this));
    this.framesWithSteps = this.stepsInFrames = 0;
    const caption = this.timeline.describeHover() || this.timeline.scaleText;
    if (byId("timeline-caption").textContent !== caption) byId("timeline-caption").textContent = caption;
    if (this.#isOpen && now - this.#labelWrittenAt >= LABEL_MS) this.#writeLabels(now);
  }

  /** What the pictures say, in a sentence, for those who do not see them. */
  #writeLabels(now) {
    this.#labelWrittenAt = now;
    const { view } = this;
    const used = byId("stat-kv").textContent;
    const running = byId("stat-running").textContent;
    const waiting = byId("stat-waiting").textContent;
    const step = formatCount(Math.max(0, view.step));
    this.grid.canvas.setAttribute("aria-label", `${used} of ${formatCount(view.numBlocks)} KV blocks in use, requests: ${running} running, ${waiting} waiting, step ${step}`);
    this.batchStrip.canvas.setAttribute("aria-label", `${byId("batch-tokens").textContent} ${byId("batch-tokens-of").textContent}; ${byId("batch-seqs").textContent} ${byId("batch-seqs-of").textContent}`);
    this.timeline.canvas.setAttribute("aria-label", `The newest ${formatCount(view.steps.length)} steps up to ${step}: KV blocks, batch tokens, requests, step time and events`);
  }

  /** Have the numbers written with the next frame instead of a moment later. */
  writeSoon() {
    this.#statusWrittenAt = -Infinity;
    this.repaint();
  }

  /** Have the sentences over the pictures written with the next numbers. */
  labelSoon() {
    this.#labelWrittenAt = -Infinity;
    this.writeSoon();
  }

  // ---- what people do ----

  #pick(slot) {
    this.select(slot);
    if (slot >= 0) this.announcer.say(`Lit up: ${this.requests.nameOf(slot) || "request"} in slot ${slot}`);
    this.#options.onpick(slot);
  }

  /** Light up a slot's blocks, batch share and row; -1: all of them. */
  select(slot) {
    this.grid.select(slot);
    this.batchStrip.selectedSlot = slot;
    this.requests.select(slot);
    this.repaint();
  }

  setMode(mode) {
    this.grid.setMode(mode);
    byId("legend").classList.toggle("by-request", mode === "request");
    for (const button of document.querySelectorAll("[data-mode]")) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    this.repaint();
  }

  #showOnly(state) {
    const next = state === this.grid.onlyState ? -1 : state;
    this.grid.showOnly(next);
    for (const button of this.statusBar.legend) button.setAttribute("aria-pressed", String(Number(button.dataset.state) === next));
    this.repaint();
  }

  #toggleTables() {
    const tables = byId("tables");
    tables.hidden = !tables.hidden;
    byId("table-button").setAttribute("aria-pressed", String(!tables.hidden));
    if (!tables.hidden) tables.dispatchEvent(new CustomEvent("tables:show"));
  }

  /** The decisions of the newest preemption up to the step that is shown. */
  #openDecisions() {
    const step = newestPreemption(this.view.steps);
    if (step >= 0) this.drawer.open(step);
    else this.announcer.say("No preemption in the steps of the timeline");
  }

  #zoomTimeline(by) {
    if (this.timeline.zoom(by)) this.writeSoon();
    this.repaint();
  }

  #onTheme(next) {
    this.#theme = next;
    this.grid.setTheme(next);
    this.batchStrip.theme = this.timeline.theme = next;
    this.#slotStyles.update(next, this.view.hello?.config?.max_num_seqs ?? 0);
    const { style } = byId("legend");
    ["a", "b", "c"].forEach((name, slot) => style.setProperty(`--slot-${name}`, css(slotRgb(slot, next.light))));
    style.setProperty("--ink-b", css(inkOn(slotRgb(1, next.light))));
    style.setProperty("--ink-shared", css(inkOn(next.states[STATES.indexOf("shared")])));
    if (next.forced) this.setMode("state"); // owner colours are not the system's colours
    this.#options.ontheme(next);
    this.repaint();
  }

  #bindTimeline() {
    const { timeline } = this;
    const hover = (x) => {
      timeline.hoverX = x;
      this.writeSoon();
    };
    timeline.canvas.addEventListener("pointermove", (event) => hover(event.offsetX * timeline.ratio));
    timeline.canvas.addEventListener("pointerleave", () => hover(-1));
    timeline.canvas.addEventListener("click", (event) => {
      hover(event.offsetX * timeline.ratio); // a finger does not move before it taps
      if (timeline.hoverPreemption >= 0) this.drawer.open(timeline.hoverPreemption);
    });
    timeline.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
      event.preventDefault();
      this.#zoomTimeline(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
    byId("zoom-in").addEventListener("click", () => this.#zoomTimeline(1));
    byId("zoom-out").addEventListener("click", () => this.#zoomTimeline(-1));
  }

  #bindControls() {
    const dialog = byId("keys-dialog");
    bindTheme({ button: byId("theme-button"), select: byId("theme-select"), onchange: (theme) => this.#onTheme(theme) });
    const help = () => dialog.showModal();
    byId("keys-button").addEventListener("click", help);
    byId("fit-button").addEventListener("click", () => this.input.fit());
    byId("table-button").addEventListener("click", () => this.#toggleTables());
    for (const button of document.querySelectorAll("[data-mode]")) button.addEventListener("click", () => this.setMode(button.dataset.mode));
    for (const button of this.statusBar.legend) button.addEventListener("click", () => this.#showOnly(Number(button.dataset.state)));
    const escape = () => {
      if (this.drawer.close()) return;
      this.#pick(-1);
      this.#showOnly(-1);
    };
    bindKeys({
      KeyC: () => this.setMode(this.grid.mode === "request" ? "state" : "request"),
      Digit0: () => this.input.fit(),
      KeyD: () => this.#openDecisions(),
      KeyW: () => this.#zoomTimeline(1),
      KeyS: () => this.#zoomTimeline(-1),
      ...this.#options.keys(),
    }, { help, escape, toggle: byId("single-keys"), steps: this.#options.steps() });
    this.#bindTimeline();
  }

  #everySecond() {
    this.connection.update();
    this.announcer.tellNews(performance.now());
    this.#options.everySecond(this);
    const tables = byId("tables");
    if (!tables.hidden) tables.dispatchEvent(new CustomEvent("tables:tick"));
    this.repaint();
  }
}

/** For tests and the console: what the page knows, and what its canvas really shows. */
export function exposePage(page) {
  const { view, grid } = page;
  window.pageglass = Object.freeze({
    view,
    grid: Object.freeze({
      cellRect: (id) => grid.cellRect(id),
      pixel: (id) => grid.pixel(id),
      colorOf: (stateName, slot) => grid.colorOf(STATES.indexOf(stateName), slot),
    }),
    get paintedStep() {
      return page.paintedStep;
    },
  });
}
