// The settings of a chat: a dot at each that differs from its default, and a way back.

/** @param {HTMLElement} root the panel with the fields */
export function bindParams(root) {
  const fields = [...root.querySelectorAll("[data-default]")];
  const changed = root.querySelector("#params-changed");
  const mark = () => {
    let count = 0;
    for (const field of fields) {
      const value = field.value.trim(); // an empty field stands for the default
      const differs = value !== "" && value !== field.dataset.default;
      field.closest(".param").classList.toggle("is-changed", differs);
      if (differs) count++;
    }
    changed.hidden = count === 0;
    changed.querySelector("b").textContent = String(count);
  };
  root.addEventListener("input", mark);
  root.querySelector("#params-reset").addEventListener("click", () => {
    for (const field of fields) field.value = field.dataset.default;
    mark();
  });
  mark();
}
