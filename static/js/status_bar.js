// Numbers of the status bar, the batch panel and the legend, written as text a few times a second.

import { cellState } from "./wire.js";
import { STATES } from "./palette.js";
import { formatCount, formatMs, formatPercent } from "./format.js";

const RATE_WINDOW_MS = 2000;
const REASON_STEPS = 200;

const STEP_TIMES = ["scheduleMs", "forwardMs", "sampleMs", "hostMs"];
const NO_RATES = Object.freeze({ prefill: 0, decode: 0 });

const byId = (id) => document.getElementById(id);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Blocks in each state, by state number. */
export function countStates(view) {
  const counts = new Array(16).fill(0);
  for (let id = 0; id < view.numBlocks; id++) counts[cellState(view.cells[id])]++;
  return counts.slice(0, STATES.length);
}

/** What computes, as `EngineInfo.means` says it: the native kernels, or torch and by which attention. */
export function engineMeans(engine) {
  return engine.kernels === "torch" && engine.attention ? `torch · ${engine.attention} attention` : engine.kernels;
}

/** Where it runs, as `EngineInfo.place` says it: how many threads, or on which device, and in how many processes. */
export function enginePlace(engine) {
  const processes = engine.tensor_parallel_size ?? 1;
  if (engine.threads === 0) return processes === 1 ? engine.device : `${processes} ${engine.device} devices`;
  const threads = countOf(engine.threads, "thread");
  return processes === 1 ? threads : `${processes} processes of ${threads}`;
}

/** How long a step took. */
function stepMs(steps, i) {
  return STEP_TIMES.reduce((sum, name) => sum + steps.get(name, i), 0);
}

/**
 * Tokens per second over the newest steps; none once the newest has ended, by the engine's clock (`nowMs`), for as long
 * as the window.
 */
export function tokenRates(steps, nowMs) {
  const last = steps.length - 1;
  if (last < 1) return NO_RATES;
  const end = steps.get("tMs", last);
  if (nowMs - end - stepMs(steps, last) > RATE_WINDOW_MS) return NO_RATES;
  let first = last - 1;
  while (first > 0 && end - steps.get("tMs", first - 1) <= RATE_WINDOW_MS) first--;
  // A step's tokens count from its start to the start of the next one, so the newest step is not in the sum yet.
  const seconds = (end - steps.get("tMs", first)) / 1000;
  if (seconds <= 0) return NO_RATES;
  let prefill = 0;
  let decode = 0;
  for (let i = first; i < last; i++) {
    prefill += steps.get("prefillTokens", i);
    decode += steps.get("decodeTokens", i);
  }
  return { prefill: prefill / seconds, decode: decode / seconds };
}

/** Tokens per second of the newest step alone, over the time that it took. */
export function stepRates(steps) {
  const last = steps.length - 1;
  const seconds = last < 0 ? 0 : stepMs(steps, last) / 1000;
  if (seconds <= 0) return NO_RATES;
  return { prefill: steps.get("prefillTokens", last) / seconds, decode: steps.get("decodeTokens", last) / seconds };
}

/** How often each reason stopped admission in the newest scheduling steps, and the newest reason (-1: none). */
export function countReasons(steps) {
  const counts = new Array(16).fill(0);
  let newest = -1;
  let numSteps = 0;
  for (let i = steps.length - 1; i >= 0 && numSteps < REASON_STEPS; i--) {
    if (steps.get("kind", i) !== 0) continue;
    const reason = steps.get("stopReason", i);
    if (newest < 0) newest = reason;
    counts[reason]++;
    numSteps++;
  }
  return { counts, newest, numSteps };
}

/** Who else watches and how often this page is painted; and what never reached it, empty when all did. */
export function describeView({ stepsPerFrame, limitText, numWatching }, { rowsLost, marksLost }) {
  const perFrame = `${formatSmall(stepsPerFrame)} step${stepsPerFrame === 1 ? "" : "s"}/frame`;
  const lost = [[rowsLost, "step"], [marksLost, "mark"]].filter(([count]) => count > 0);
  return {
    pace: [stepsPerFrame > 0 ? perFrame : "", limitText, numWatching > 0 ? `${formatCount(numWatching)} watching` : ""].filter(Boolean).join(", "),
    lost: lost.length > 0 ? `lost: ${lost.map(([count, what]) => countOf(count, what)).join(", ")}` : "",
  };
}

/** Writes what an `EngineView` says into the page. */
export class StatusBar {
  constructor(view, batchStrip) {
    this.view = view;
    this.batchStrip = batchStrip;
    this.kvParts = ["shared", "private", "cached"].map((part) => document.querySelector(`#kv-bar .kv-${part}`));
    this.hostParts = [".host-pinned", ".host-cached"].map((part) => document.querySelector(`#host-bar ${part}`));
    this.hostKeys = [byId("host-meter"), ...document.querySelectorAll(".host-key")];
    this.legend = [...document.querySelectorAll("#legend [data-state]")];
    this.reasons = [...document.querySelectorAll("#reasons [data-reason]")];
  }

  /** What goes with the pictures; call with every frame, so that numbers and pictures are of the same step. */
  writeFrame() {
    if (this.view.numBlocks === 0) return;
    setText(byId("stat-step"), formatCount(Math.max(0, this.view.step)));
    this.#writeBatch();
  }

  /** How the model is run; call when the server has introduced itself. Older recordings do not say it. */
  writeEngine() {
    const engine = this.view.hello?.engine;
    if (!engine || !byId("stat-engine")) return;
    setText(byId("stat-dtype"), engine.dtype);
    setText(byId("stat-engine"), `${engineMeans(engine)} · KV ${engine.kv_dtype} · ${enginePlace(engine)}`);
  }

  /** Everything else; call a few times a second. `rates`: tokens per second, {prefill, decode}. */
  write(rates) {
    const { view } = this;
    if (view.numBlocks === 0) return;
    const counts = countStates(view);
    this.#writeSteps(rates);
    this.#writeMemory(counts);
    this.#writeHost();
    this.#writeReasons();
    for (const button of this.legend) setText(button.querySelector("b"), formatCount(counts[button.dataset.state]));
  }

  #writeSteps(rates) {
    const { steps } = this.view;
    const last = steps.length - 1;
    const none = this.view.step > 0 ? "–" : "0"; // before the first step, or at one whose row is gone
    setText(byId("stat-step-ms"), last < 0 ? "" : formatMs(stepMs(steps, last)));
    setText(byId("stat-running"), last < 0 ? none : formatCount(steps.get("running", last)));
    setText(byId("stat-waiting"), last < 0 ? none : formatCount(steps.get("waiting", last)));
    setText(byId("stat-prefill"), formatCount(Math.round(rates.prefill)));
    setText(byId("stat-decode"), formatCount(Math.round(rates.decode)));
  }

  #writeMemory(counts) {
    const { numBlocks } = this.view;
    const [free, cached] = counts;
    const shared = counts[STATES.indexOf("shared")];
    const used = numBlocks - free - cached;
    setText(byId("stat-kv"), formatPercent(used, numBlocks));
    setText(byId("stat-kv-blocks"), `${formatCount(used)} of ${formatCount(numBlocks)} blocks`);
    placeParts(this.kvParts, [shared, used - shared, cached], numBlocks);
  }

  /** The host tier: what may not make room, then what may. */
  #writeHost() {
    const { host } = this.view;
    for (const element of this.hostKeys) if (element) element.hidden = host === null;
    if (host === null) return;
    setText(byId("stat-host"), formatPercent(host.used, host.total));
    const loading = host.loading > 0 ? `, ${formatCount(host.loading)} loading` : "";
    setText(byId("stat-host-blocks"), `${formatCount(host.used)} of ${formatCount(host.total)} blocks, ${formatCount(host.pinned)} kept${loading}`);
    placeParts(this.hostParts, [host.pinned, host.used - host.pinned], host.total);
  }

  #writeBatch() {
    const { config } = this.view.hello;
    const { prefillTokens, decodeTokens, numSeqs } = this.batchStrip.counts();
    setText(byId("batch-caption"), this.view.batch.step > 0 ? `of step ${formatCount(this.view.batch.step)}` : "no step yet");
    setText(byId("batch-tokens"), formatCount(prefillTokens + decodeTokens));
    setText(byId("batch-tokens-of"), `of ${formatCount(config.max_num_batched_tokens)} tokens`);
    setText(byId("batch-prefill"), formatCount(prefillTokens));
    setText(byId("batch-decode"), formatCount(decodeTokens));
    setText(byId("batch-seqs"), formatCount(numSeqs));
    setText(byId("batch-seqs-of"), `of ${formatCount(config.max_num_seqs)} slots`);
  }

  #writeReasons() {
    const { counts, newest } = countReasons(this.view.steps);
    for (const item of this.reasons) {
      const reason = Number(item.dataset.reason);
      item.hidden = counts[reason] === 0;
      item.classList.toggle("is-now", reason === newest);
      item.querySelector("meter").value = counts[reason];
      setText(item.querySelector("b"), formatCount(counts[reason]));
      if (reason === newest) setText(byId("stop-reason"), item.dataset.words);
    }
  }
}

/** Lay the parts of a bar side by side, in thousandths of `total`. */
function placeParts(parts, values, total) {
  let x = 0;
  values.forEach((value, i) => {
    const width = (1000 * value) / Math.max(1, total);
    parts[i].setAttribute("x", x.toFixed(1));
    parts[i].setAttribute("width", width.toFixed(1));
    x += width;
  });
}

function countOf(count, what) {
  return `${formatCount(count)} ${what}${count === 1 ? "" : "s"}`;
}

function formatSmall(value) {
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toString() : value.toFixed(1);
}
