// The dialog in which the scheduler's policies are changed. Only what a person has chosen in it is sent, so that a change
// that somebody else makes meanwhile stays; whatever is untouched follows the policies in force.

const byId = (id) => document.getElementById(id);

/** What a refusal says, in a few words: the body is problem details, or an error as the API gives it. */
export function describeProblem(status, text) {
  try {
    const body = JSON.parse(text);
    const words = body.detail ?? body.error?.message;
    if (typeof words === "string" && words !== "") return words;
  } catch {
    // Not JSON: a proxy's page, say.
  }
  return status ? `The server answered with error ${status}.` : "The server does not answer.";
}

/**
 * What is to be sent: of the fields that a person has touched, those that are not in force already.
 *
 * @param {{name: string, value: string}[]} selects
 * @param {Set<string>} touched names of fields
 * @param {Record<string, string>} now the policies in force
 */
export function changesOf(selects, touched, now) {
  const changed = selects.filter(({ name, value }) => touched.has(name) && value !== now[name]);
  return Object.fromEntries(changed.map(({ name, value }) => [name, value]));
}

/** Offer exactly `names`; the server's other run may have others. What was chosen stays chosen where it can. */
function offer(select, names) {
  if ([...select.options].map(({ value }) => value).join() === names.join()) return;
  const { value } = select;
  select.replaceChildren(...names.map((name) => new Option(name)));
  select.value = value;
}

/** POST `changes`; returns what went wrong in words, or "". Read as text: no answer becomes part of the page. */
async function send(url, changes) {
  try {
    const response = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(changes) });
    return response.ok ? "" : describeProblem(response.status, await response.text());
  } catch {
    return describeProblem(0, "");
  }
}

/** Wires the dialog. `announce(text)` says something. */
export function bindPolicies({ announce }) {
  const dialog = byId("policy-dialog");
  const form = byId("policy-form");
  const problem = byId("policy-problem");
  const selects = [...form.querySelectorAll("select")];
  const touched = new Set();
  let isSending = false;

  const tell = (words) => {
    problem.textContent = words;
    problem.hidden = words === "";
  };
  const now = () => byId("policies-now").dataset;
  const follow = () => {
    const allowed = JSON.parse(now().allowed);
    for (const select of selects) {
      offer(select, allowed[select.name]);
      if (!select.value) touched.delete(select.name); // it can no longer be chosen
      if (!touched.has(select.name)) select.value = now()[select.name];
    }
  };
  const finish = (words) => {
    dialog.close();
    announce(words);
  };
  const submit = async () => {
    const changes = changesOf(selects, touched, now());
    if (Object.keys(changes).length === 0) {
      finish("The policies stay as they are");
      return;
    }
    const refusal = await send(form.action, changes);
    if (refusal) {
      tell(refusal);
      return;
    }
    finish("The policies are changed from the next step on");
    document.body.dispatchEvent(new CustomEvent("engine:tick"));
  };

  document.addEventListener("click", ({ target }) => {
    if (!target.closest?.("#policy-button")) return; // it is part of what is swapped
    touched.clear();
    follow();
    tell("");
    dialog.showModal();
  });
  form.addEventListener("change", ({ target }) => touched.add(target.name));
  document.addEventListener("htmx:after:swap", () => {
    if (dialog.open) follow();
  });
  byId("policy-cancel").addEventListener("click", () => dialog.close());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (isSending) return;
    isSending = true;
    await submit();
    isSending = false;
  });
}
