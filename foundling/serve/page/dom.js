// Elements made one by one: createElement and textContent, so that nothing a model writes is markup.

/** An element. Functions named on... are listeners; undefined, null and false leave a property out. */
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** One of the symbols of index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "glyph");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows an icon and says a name. */
export function iconButton(name, glyph, onclick, properties = {}) {
  return el(
    "button",
    { type: "button", class: "icon", "aria-label": name, title: name, onclick, ...properties },
    icon(glyph),
  );
}

export const byId = (id) => document.getElementById(id);

/** What a screen reader says, when it has time. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** A line at the foot of the page, with at most one thing to do about it. */
export function toast(text, action = null) {
  const line = el("div", { class: "toast" }, el("span", {}, text));
  const leave = () => line.remove();
  if (action) {
    const act = () => {
      leave();
      action.run();
    };
    line.append(el("button", { type: "button", onclick: act }, action.name));
  }
  line.append(iconButton("Dismiss", "close", leave));
  byId("toasts").replaceChildren(line);
  setTimeout(leave, action ? 10_000 : 5_000);
}

/** What could be undone cannot be any longer, once something new stands on it. */
export function dropToast() {
  byId("toasts").replaceChildren();
}

/** Copies a text, and says so on the button that was pressed. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https or permission the old way is left: select and copy.
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.querySelector("use").setAttribute("href", "#icon-right");
  announce("Copied");
  setTimeout(() => button.querySelector("use").setAttribute("href", "#icon-copy"), 1200);
}
