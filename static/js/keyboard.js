// Single-letter keys of the page, by position (event.code) so that any keyboard layout works; and their switch.

const STORE_KEY = "pageglass.single-keys";

/** Whether a key press belongs to what has the focus. A slider only takes the keys that move it. */
function isForInput(target, isStep) {
  if (target.matches?.("input[type=range]")) return isStep;
  return target.closest?.("input, select, textarea, [contenteditable], dialog[open]") != null;
}

/** Whether Space presses what has the focus. */
function isPressable(target) {
  return target.closest?.("button, a, summary") != null;
}

/**
 * Call `actions[event.code]` on a plain key press. `?` goes by character. The switch turns all of them off
 * but Escape (WCAG 2.1.4) and is remembered in this browser.
 * @param {Record<string, () => void>} actions
 * @param {{help: () => void, escape: () => void, toggle: HTMLInputElement,
 *   steps?: Record<string, (event: KeyboardEvent) => void>}} fixed `steps`: keys that may be held down, and that Shift
 *   and Alt modify
 */
export function bindKeys(actions, { help, escape, toggle, steps = {} }) {
  toggle.checked = localStorage.getItem(STORE_KEY) !== "off";
  toggle.addEventListener("change", () => localStorage.setItem(STORE_KEY, toggle.checked ? "on" : "off"));
  document.addEventListener("keydown", (event) => {
    const step = steps[event.code];
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || isForInput(event.target, Boolean(step))) return;
    if (event.key === "Escape") return escape();
    if (!toggle.checked) return;
    if (step) {
      event.preventDefault(); // no scrolling, no "back"
      step(event);
    } else if (!event.repeat && !event.altKey) {
      press(event, actions, help);
    }
  });
}

/** A key that does something does nothing else: a field that gets the focus would get the character too. */
function press(event, actions, help) {
  const action = event.key === "?" ? help : event.shiftKey ? undefined : actions[event.code];
  if (!action || (event.code === "Space" && isPressable(event.target))) return;
  event.preventDefault();
  action();
}

/** Call `action` on a plain press of one letter, as `bindKeys` would, on any page; the switch counts here too. */
export function bindKey(code, action) {
  document.addEventListener("keydown", (event) => {
    const { defaultPrevented, ctrlKey, metaKey, altKey, shiftKey, repeat } = event;
    if (defaultPrevented || ctrlKey || metaKey || altKey || shiftKey || repeat || event.code !== code) return;
    if (isForInput(event.target, false) || localStorage.getItem(STORE_KEY) === "off") return;
    event.preventDefault();
    action();
  });
}
