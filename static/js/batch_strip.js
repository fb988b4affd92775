// The batch of the newest step: tokens against the budget, slots against the limit.
// Prefill is drawn at full height and decode at half, so that the two differ without colour.

import { css, slotRgb } from "./palette.js";
import { BATCH_KIND } from "./wire.js";

const TOKENS_SHARE = 0.56;
const GAP_CSS = 6;

/** Paints `view.batch`. */
export class BatchStrip {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.ctx = canvas.getContext("2d", { alpha: false });
    this.theme = null;
    this.selectedSlot = -1;
    this.resize();
  }

  resize() {
    this.ratio = devicePixelRatio || 1;
    this.width = Math.max(1, Math.round(this.canvas.clientWidth * this.ratio));
    this.height = Math.max(1, Math.round(this.canvas.clientHeight * this.ratio));
    Object.assign(this.canvas, { width: this.width, height: this.height });
  }

  paint() {
    const { ctx, theme, view, ratio } = this;
    ctx.fillStyle = css(theme.panel);
    ctx.fillRect(0, 0, this.width, this.height);
    const config = view.hello?.config;
    if (!config) return;
    const gap = Math.round(GAP_CSS * ratio);
    const tokensHeight = Math.round((this.height - gap) * TOKENS_SHARE);
    this.#drawTokens(tokensHeight, config.max_num_batched_tokens);
    this.#drawSlots(tokensHeight + gap, this.height - tokensHeight - gap, config.max_num_seqs);
  }

  #drawTokens(height, budget) {
    const { ctx, theme, ratio } = this;
    ctx.fillStyle = css(theme.grid);
    ctx.fillRect(0, 0, this.width, height);
    let tokensBefore = 0;
    for (const entry of this.view.batch.entries) {
      const x = Math.round((this.width * tokensBefore) / budget);
      tokensBefore += entry.tokens;
      const end = Math.round((this.width * tokensBefore) / budget);
      const hairline = end - x > 3 * ratio ? Math.round(ratio) : 0;
      this.#fill(entry, x, 0, Math.max(end - x - hairline, 1), height);
    }
    ctx.fillStyle = css(theme.muted);
    ctx.fillRect(this.width - Math.round(2 * ratio), 0, Math.round(2 * ratio), height); // the budget
  }

  /** One place per slot, so that a sequence stays where it is from step to step. */
  #drawSlots(top, height, maxNumSeqs) {
    const { ctx, theme, ratio } = this;
    const step = this.width / maxNumSeqs;
    const hairline = step > 3 * ratio ? Math.round(ratio) : 0;
    const place = (slot) => [Math.round(slot * step), Math.max(1, Math.round((slot + 1) * step) - Math.round(slot * step) - hairline)];
    ctx.fillStyle = css(theme.grid);
    for (let slot = 0; slot < maxNumSeqs; slot++) {
      const [x, width] = place(slot);
      ctx.fillRect(x, top, width, height);
    }
    for (const entry of this.view.batch.entries) {
      const [x, width] = place(entry.slot);
      this.#fill(entry, x, top, width, height);
    }
  }

  #fill(entry, x, top, width, height) {
    const isDim = this.selectedSlot >= 0 && this.selectedSlot !== entry.slot;
    const share = entry.kind === BATCH_KIND.DECODE ? 0.5 : 1;
    this.ctx.fillStyle = css(slotRgb(entry.slot, this.theme.light), isDim ? 0.22 : 1);
    this.ctx.fillRect(x, top + Math.round(height * (1 - share)), width, Math.round(height * share));
  }

  /** Tokens by kind and sequences of the batch. */
  counts() {
    const sums = { prefillTokens: 0, decodeTokens: 0, numSeqs: this.view.batch.entries.length };
    for (const { kind, tokens } of this.view.batch.entries) {
      sums[kind === BATCH_KIND.DECODE ? "decodeTokens" : "prefillTokens"] += tokens;
    }
    return sums;
  }
}
