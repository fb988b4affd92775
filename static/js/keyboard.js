// Single-letter keys of the page, by position (event.code) so that any keyboard layout works; and their switch.

const STORE_KEY = "pageglass.single-keys";

/** Whether a key press belongs to what has the focus. */
function isForInput(target) {
  return target.closest?.("input, select, textarea, [contenteditable], dialog[open]") != null;
}

/**
 * Call `actions[event.code]` on a plain key press. `?` goes by character. The switch turns all of them off
 * but Escape (WCAG 2.1.4) and is remembered in this browser.
 * @param {Record<string, () => void>} actions
 * @param {{help: () => void, escape: () => void, toggle: HTMLInputElement}} fixed
 */
export function bindKeys(actions, { help, escape, toggle }) {
  toggle.checked = localStorage.getItem(STORE_KEY) !== "off";
  toggle.addEventListener("change", () => localStorage.setItem(STORE_KEY, toggle.checked ? "on" : "off"));
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isForInput(event.target)) return;
    if (event.key === "Escape") return escape();
    if (!toggle.checked || event.repeat) return;
    if (event.key === "?") help();
    else if (!event.shiftKey) actions[event.code]?.();
  });
}
