// The socket of the live page: keeps an EngineView up to date, acknowledges what is painted, reconnects.

import { encodeAck } from "./wire.js";

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 30_000;
const JITTER = 0.3;
const MAX_FPS = 60;
const HIDDEN_FPS = 1;

const CLOSE_REFUSED = 1008; // for good; 1013 is "later", and tried again like everything else
const CLOSE_PROTOCOL = 4002; // ours, towards the server: the page cannot read what it sent

/**
 * How long to wait before connecting again.
 * @param {number} attempt failed tries so far, from 1
 * @param {() => number} random 0 to 1
 */
export function retryDelayMs(attempt, random = Math.random) {
  const delay = FIRST_DELAY_MS * 2 ** Math.min(attempt - 1, 16) * (1 + JITTER * random());
  return Math.min(delay, MAX_DELAY_MS);
}

/**
 * Usage: `new EngineStream(view, { onchange, onstatus })`, `start()`, and after each painted frame `painted()`:
 * the server sends two messages ahead of that and no more.
 *
 * - `onchange({lastStep, changed, hello})`: the view has taken a message; `changed` as from `EngineView.apply`
 * - `onstatus({connected, attempt, since, retryAt, refused, reason})`: `connected` is true once the first message of a
 *   connection is in the view; `attempt` counts failed tries since; `since` is when this state of connected or not began
 *   and `retryAt` when the next try is due (Date.now() milliseconds, null: none); `refused`: no further tries; `reason`:
 *   why the last connection ended, empty when nobody said
 *
 * A hidden page paints nothing, so its messages are acknowledged as they come, once a second.
 */
export class EngineStream {
  #view;
  #options;
  #env;
  #socket = null;
  #queue = Promise.resolve();
  #applied = 0;
  #acknowledged = 0;
  #fps;
  #timer = null;
  #running = false;
  #onVisibility = () => this.#visibilityChanged();

  /**
   * @param {import("./reducer.js").EngineView} view
   * @param {{url?: string, fps?: number, onchange?: Function, onstatus?: Function, env?: object}} options
   *   env: stand-ins for the browser's globals in tests
   */
  constructor(view, { url = "/ws/engine", fps = MAX_FPS, onchange = () => {}, onstatus = () => {}, env = globalThis } = {}) {
    this.#view = view;
    this.#options = { url, onchange, onstatus };
    this.#fps = fps;
    this.#env = env;
    this.status = { connected: false, attempt: 0, since: Date.now(), retryAt: null, refused: false, reason: "" };
  }

  /** Connect, and stay connected until `stop`. */
  start() {
    if (this.#running) return;
    this.#running = true;
    this.#env.document.addEventListener("visibilitychange", this.#onVisibility);
    this.#connect();
  }

  /** Disconnect for good (`start` begins anew). */
  stop() {
    this.#running = false;
    this.#env.document.removeEventListener("visibilitychange", this.#onVisibility);
    this.#cancelRetry();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close(1000);
    this.#setStatus({ connected: false, retryAt: null, reason: "stopped" });
  }

  /** All that the view has taken so far is on the screen. */
  painted() {
    if (this.#applied !== this.#acknowledged) this.#acknowledge();
  }

  /** Frames per second that the page wants, 1 to 60; the server is told at once. */
  setFps(fps) {
    this.#fps = fps;
    this.#tell();
  }

  get hidden() {
    return this.#env.document.visibilityState === "hidden";
  }

  // ---- connecting ----

  #connect() {
    this.#cancelRetry();
    const { WebSocket, location } = this.#env;
    const url = new URL(this.#options.url, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const lastStep = this.#view.steps.lastStep;
    if (lastStep >= 0) {
      url.searchParams.set("from", lastStep);
      url.searchParams.set("session", this.#view.session);
    }
    const socket = new WebSocket(url.href);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    this.#applied = this.#acknowledged = 0;
    socket.onmessage = (event) => {
      // One after the other, even when a keyframe takes its time to inflate, and across a reconnect too. At most
      // two are waiting.
      this.#queue = this.#queue.then(() => this.#take(socket, event.data));
    };
    socket.onclose = (event) => this.#closed(socket, event);
  }

  #closed(socket, { code, reason }) {
    if (socket !== this.#socket) return;
    this.#socket = null;
    if (code === CLOSE_REFUSED) this.#refuse(reason || "refused by the server");
    else this.#retry(reason);
  }

  #retry(reason) {
    const attempt = this.status.attempt + 1;
    const delay = retryDelayMs(attempt);
    this.#timer = this.#env.setTimeout(() => this.#connect(), delay);
    this.#setStatus({ connected: false, attempt, retryAt: Date.now() + delay, reason });
  }

  #refuse(reason) {
    this.#setStatus({ connected: false, retryAt: null, refused: true, reason });
  }

  #cancelRetry() {
    if (this.#timer !== null) this.#env.clearTimeout(this.#timer);
    this.#timer = null;
  }

  // ---- messages ----

  async #take(socket, buffer) {
    if (socket !== this.#socket) return; // closed meanwhile; the next connection begins with a whole picture
    let change;
    try {
      change = await this.#view.apply(buffer);
    } catch (error) {
      this.#giveUp(socket, error);
      return;
    }
    if (socket !== this.#socket) return;
    this.#applied++;
    if (this.hidden) this.#acknowledge();
    if (!this.status.connected) {
      this.#setStatus({ connected: true, attempt: 0, retryAt: null, refused: false, reason: "" });
    }
    this.#emit(this.#options.onchange, change);
  }

  #giveUp(socket, error) {
    if (socket !== this.#socket) return;
    this.#socket = null;
    socket.close(CLOSE_PROTOCOL, "unreadable");
    if (error.fatal) this.#refuse(error.message);
    else this.#retry(error.message);
  }

  // ---- acknowledging ----

  #acknowledge() {
    this.#acknowledged = this.#applied;
    this.#tell();
  }

  #tell() {
    const socket = this.#socket;
    if (socket?.readyState !== 1) return;
    socket.send(encodeAck({
      fps: this.hidden ? HIDDEN_FPS : this.#fps,
      hidden: this.hidden,
      step: Math.max(0, this.#view.step),
      painted: this.#acknowledged,
    }));
  }

  #visibilityChanged() {
    if (this.hidden) this.#acknowledge(); // nothing paints any more
    else if (this.#timer !== null) this.#connect(); // somebody looks: do not wait
    else this.#tell();
  }

  #setStatus(changes) {
    const since = changes.connected === this.status.connected ? this.status.since : Date.now();
    this.status = { ...this.status, ...changes, since };
    this.#emit(this.#options.onstatus, this.status);
  }

  /** A listener that throws is reported as any other error and stops nothing here. */
  #emit(listener, detail) {
    queueMicrotask(() => listener(detail));
  }
}
