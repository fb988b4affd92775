// Dark, light or as the system has it. The server reads the cookie, and CSS asks the system, so that a page never flashes.

import { bindKey } from "./keyboard.js";
import { readTheme } from "./palette.js";

const COOKIE = "pageglass_theme";
const COOKIE_SECONDS = 365 * 24 * 3600;
const MEDIA = ["(prefers-color-scheme: light)", "(forced-colors: active)"];

const ORDER = ["dark", "light", "system"];

/** The theme after `name`. */
export function nextTheme(name) {
  return ORDER[(ORDER.indexOf(name) + 1) % ORDER.length];
}

/**
 * Wires the theme controls and the key T; calls `onchange(theme)` with the resolved colours, at once and after every
 * change. A page may lack `select`.
 */
export function bindTheme({ button, select, onchange = () => {} }) {
  const root = document.documentElement;
  const tell = () => onchange(readTheme(root));
  const set = (name) => {
    root.dataset.theme = name;
    if (select) select.value = name;
    button.querySelector("#theme-name").textContent = name;
    document.cookie = `${COOKIE}=${name}; path=/; max-age=${COOKIE_SECONDS}; samesite=strict`;
    tell();
  };
  const goOn = () => set(nextTheme(root.dataset.theme));
  button.addEventListener("click", goOn);
  bindKey("KeyT", goOn);
  select?.addEventListener("change", () => set(select.value));
  for (const query of MEDIA) matchMedia(query).addEventListener("change", tell);
  tell();
}
