// What the page says about its connection and about the engine's state.

import { formatCount } from "./format.js";

const WORDS = { loading: "loading the model", ready: "live", draining: "shutting down", failed: "engine failed", recorded: "recorded" };

/** Keeps dot, text and banner; call `update` on every change and once a second. `describe`: words for the banner. */
export class ConnectionView {
  #wasConnected = false;

  constructor(view, banner, text, describe = describeOutage) {
    this.describe = describe;
    this.view = view;
    this.banner = banner;
    this.text = text;
    this.status = null;
  }

  update(status = this.status, now = Date.now()) {
    this.status = status;
    if (status === null) return;
    this.#wasConnected ||= status.connected;
    const isDown = !status.connected && (this.#wasConnected || status.attempt > 0 || status.refused);
    document.body.dataset.engine = this.view.status;
    document.body.dataset.connection = status.connected ? "live" : isDown ? "down" : "connecting";
    this.text.textContent = status.connected ? (WORDS[this.view.status] ?? this.view.status) : isDown ? "disconnected" : "connecting";
    this.banner.hidden = !isDown;
    if (isDown) this.#setBanner(this.describe(this.view, status, now));
  }

  #setBanner(text) {
    if (this.banner.textContent !== text) this.banner.textContent = text;
  }
}

/** One sentence for the banner. */
export function describeOutage(view, status, now) {
  const parts = [`Disconnected for ${Math.max(0, Math.round((now - status.since) / 1000))} s`];
  if (view.step >= 0) parts.push(`the picture is that of step ${formatCount(view.step)}`);
  if (status.reason && !status.refused) parts.push(status.reason);
  if (status.refused) parts.push(`not trying again: ${status.reason}`);
  else if (status.retryAt !== null && status.retryAt > now) parts.push(`next try in ${Math.ceil((status.retryAt - now) / 1000)} s`);
  else parts.push("connecting");
  return `${parts.join(", ")}.`;
}
