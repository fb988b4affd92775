// Numbers of the status bar, the batch panel and the legend, written as text a few times a second.

import { cellState } from "./wire.js";
import { STATES } from "./palette.js";
import { formatCount, formatMs } from "./format.js";

const RATE_WINDOW_MS = 2000;
const REASON_STEPS = 200;

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

/** Tokens per second over the newest steps; none once no step has come (`quietMs`) for as long as the window. */
export function tokenRates(steps, quietMs) {
  if (steps.length < 2 || quietMs > RATE_WINDOW_MS) return { prefill: 0, decode: 0 };
  const last = steps.length - 1;
  const end = steps.get("tMs", last);
  let first = last - 1;
  while (first > 0 && end - steps.get("tMs", first - 1) <= RATE_WINDOW_MS) first--;
  // A step's tokens count from its start to the start of the next one, so the newest step is not in the sum yet.
  const seconds = (end - steps.get("tMs", first)) / 1000;
  if (seconds <= 0) return { prefill: 0, decode: 0 };
  let prefill = 0;
  let decode = 0;
  for (let i = first; i < last; i++) {
    prefill += steps.get("prefillTokens", i);
    decode += steps.get("decodeTokens", i);
  }
  return { prefill: prefill / seconds, decode: decode / seconds };
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
    this.legend = [...document.querySelectorAll("#legend [data-state]")];
    this.reasons = [...document.querySelectorAll("#reasons [data-reason]")];
  }

  /** What goes with the pictures; call with every frame, so that numbers and pictures are of the same step. */
  writeFrame() {
    if (this.view.numBlocks === 0) return;
    setText(byId("stat-step"), formatCount(Math.max(0, this.view.step)));
    this.#writeBatch();
  }

  /** Everything else; call a few times a second. `quietMs`: how long no step has come. */
  write(quietMs) {
    const { view } = this;
    if (view.numBlocks === 0) return;
    const counts = countStates(view);
    this.#writeSteps(quietMs);
    this.#writeMemory(counts);
    this.#writeReasons();
    for (const button of this.legend) setText(button.querySelector("b"), formatCount(counts[button.dataset.state]));
  }

  #writeSteps(quietMs) {
    const { steps } = this.view;
    const last = steps.length - 1;
    if (last < 0) return;
    const ms = ["scheduleMs", "forwardMs", "sampleMs", "hostMs"].reduce((sum, name) => sum + steps.get(name, last), 0);
    setText(byId("stat-step-ms"), formatMs(ms));
    setText(byId("stat-running"), formatCount(steps.get("running", last)));
    setText(byId("stat-waiting"), formatCount(steps.get("waiting", last)));
    const rates = tokenRates(steps, quietMs);
    setText(byId("stat-prefill"), formatCount(Math.round(rates.prefill)));
    setText(byId("stat-decode"), formatCount(Math.round(rates.decode)));
  }

  #writeMemory(counts) {
    const { numBlocks } = this.view;
    const [free, cached] = counts;
    const shared = counts[STATES.indexOf("shared")];
    const used = numBlocks - free - cached;
    setText(byId("stat-kv"), `${Math.round((100 * used) / numBlocks)}%`);
    setText(byId("stat-kv-blocks"), `${formatCount(used)} of ${formatCount(numBlocks)} blocks`);
    let x = 0;
    [shared, used - shared, cached].forEach((blocks, i) => {
      const width = (1000 * blocks) / numBlocks;
      this.kvParts[i].setAttribute("x", x.toFixed(1));
      this.kvParts[i].setAttribute("width", width.toFixed(1));
      x += width;
    });
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

function countOf(count, what) {
  return `${formatCount(count)} ${what}${count === 1 ? "" : "s"}`;
}

function formatSmall(value) {
  return value >= 10 || Number.isInteger(value) ? Math.round(value).toString() : value.toFixed(1);
}
