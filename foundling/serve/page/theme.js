// Light or dark: as the system has it, or as the reader chose with the switch.
//
// A plain script and not a module: it runs before the first paint, so that nothing flashes.

(() => {
  const KEY = "foundling.theme";
  const NAMES = { auto: "as the system", light: "light", dark: "dark" };
  const root = document.documentElement;

  function chosen() {
    try {
      const kept = localStorage.getItem(KEY);
      return kept in NAMES ? kept : "auto";
    } catch {
      return root.dataset.theme ?? "auto";
    }
  }

  function apply(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function label(button) {
    const said = `Colours: ${NAMES[chosen()]}`;
    button.setAttribute("aria-label", said);
    button.title = said;
    button.querySelector("use").setAttribute("href", `#icon-${chosen()}`);
  }

  apply(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    label(button);
    button.addEventListener("click", () => {
      const all = Object.keys(NAMES);
      const next = all[(all.indexOf(chosen()) + 1) % all.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // Without storage the choice holds until the page is left.
      }
      apply(next);
      label(button);
    });
  });
})();
