// One answer as it comes in, written into its place on the page. The server's task writes it, whoever watches.

import { formatCount } from "./format.js";

/** What the line under a growing answer says. @param {object} stats as in the stream's `stats` event */
export function describePhase(stats) {
  const { phase, num_computed_tokens: computed, num_known_tokens: known, num_output_tokens: output, num_preemptions: preempted } = stats;
  const again = preempted > 0 ? `, preempted ${formatCount(preempted)} ${preempted === 1 ? "time" : "times"}` : "";
  if (phase === "queued") return `queued${stats.waits_for ? `: ${stats.waits_for}` : ""}${again}`;
  if (phase === "prefill") return `${preempted > 0 ? "computing again" : "prefill"} ${known > 0 ? Math.floor((100 * computed) / known) : 0}%, ${formatCount(computed)} of ${formatCount(known)} tokens${again}`;
  if (phase === "decode") return `decoding, ${formatCount(output)} ${output === 1 ? "token" : "tokens"}${stats.tok_s ? `, ${formatCount(Math.round(stats.tok_s))} tok/s` : ""}${again}`;
  return "starting";
}

/**
 * Follows the answer in `element` (it has data-stream, and in data-from how many characters it shows). The stream's
 * ids count characters, so a connection that comes back goes on where the last one ended.
 *
 * A browser opens six connections to a server, over all its tabs; a stream holds one. `pause` gives it back.
 */
export class AnswerStream {
  #source = null;
  #hasEnded = false;

  /**
   * Nothing is asked for before `resume`.
   *
   * @param {HTMLElement} element
   * @param {{ontext: () => void, onstats: (stats: object) => void, onend: (element: HTMLElement) => void}} options
   */
  constructor(element, { ontext, onstats, onend }) {
    this.element = element;
    this.text = element.querySelector(".stream-text");
    this.phase = element.querySelector(".phase");
    this.options = { ontext, onstats, onend };
    this.offset = Number(element.dataset.from);
  }

  /** Go on where the text ends; does nothing while it runs or once it has ended. */
  resume() {
    if (this.#source || this.#hasEnded) return;
    this.#source = new EventSource(`${this.element.dataset.stream}?from=${this.offset}`);
    this.#source.addEventListener("open", () => delete this.phase.dataset.lost);
    this.#source.addEventListener("text", (event) => this.#append(event));
    this.#source.addEventListener("stats", (event) => this.#takeStats(JSON.parse(event.data)));
    this.#source.addEventListener("end", () => this.#end());
    this.#source.addEventListener("error", () => this.#lost());
  }

  /** Let go of the connection; the answer goes on meanwhile. */
  pause() {
    this.#source?.close();
    this.#source = null;
  }

  close() {
    this.#hasEnded = true;
    this.pause();
  }

  #append(event) {
    this.offset = Number(event.lastEventId);
    this.text.append(JSON.parse(event.data).text);
    this.options.ontext();
  }

  #takeStats(stats) {
    this.phase.dataset.phase = stats.phase;
    this.#say(describePhase(stats));
    this.options.onstats(stats);
  }

  #end() {
    this.close();
    this.options.onend(this.element);
  }

  #lost() {
    this.phase.dataset.lost = "";
    const isOver = this.#source?.readyState === 2; // the server has refused: no such message any more
    this.#say(isOver ? "The connection is lost; reload the page to see whether the answer went on." : "The connection is lost, trying again. The answer goes on meanwhile.");
  }

  #say(text) {
    this.phase.querySelector(".phase-text").textContent = text;
  }
}
