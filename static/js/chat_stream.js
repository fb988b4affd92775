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
 * Follows the answer in `element` (it has data-stream). The stream's ids count characters, so a connection that
 * comes back goes on where the last one ended.
 */
export class AnswerStream {
  #source;

  /**
   * @param {HTMLElement} element
   * @param {{ontext: () => void, onstats: (stats: object) => void, onend: (element: HTMLElement) => void}} options
   */
  constructor(element, { ontext, onstats, onend }) {
    this.element = element;
    this.text = element.querySelector(".stream-text");
    this.phase = element.querySelector(".phase");
    this.options = { ontext, onstats, onend };
    this.#source = new EventSource(element.dataset.stream);
    this.#source.addEventListener("open", () => delete this.phase.dataset.lost);
    this.#source.addEventListener("text", (event) => this.#append(JSON.parse(event.data).text));
    this.#source.addEventListener("stats", (event) => this.#takeStats(JSON.parse(event.data)));
    this.#source.addEventListener("end", () => this.#end());
    this.#source.addEventListener("error", () => this.#lost());
  }

  close() {
    this.#source.close();
  }

  #append(text) {
    this.text.append(text);
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
    const isOver = this.#source.readyState === 2; // the server has refused: no such message any more
    this.#say(isOver ? "The connection is lost; reload the page to see whether the answer went on." : "The connection is lost, trying again. The answer goes on meanwhile.");
  }

  #say(text) {
    this.phase.querySelector(".phase-text").textContent = text;
  }
}
