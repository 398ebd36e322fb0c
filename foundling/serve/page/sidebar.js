// The list of conversations: found by words, named anew, deleted, carried out of and into the browser.

import { byId, el, iconButton, toast } from "./dom.js";
import { titleOf } from "./conversations.js";

const DAY = 86_400_000;

/** Today, yesterday, this week, or the month. */
function when(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 6 * DAY) return "This week";
  return new Intl.DateTimeFormat("en", { month: "long", year: "numeric" }).format(time);
}

export class Sidebar {
  constructor(app) {
    this.app = app;
    this.search = byId("search");
    this.search.addEventListener("input", () => this.draw());
    byId("new").addEventListener("click", () => {
      app.begin();
      this.close();
    });
    byId("open-drawer").addEventListener("click", () => this.open());
    byId("close-drawer").addEventListener("click", () => this.close());
    byId("veil").addEventListener("click", () => this.close());
    byId("export").addEventListener("click", () => this.export());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.import());
    // On a wide window the list always stands; the drawer is for narrow ones.
    matchMedia("(min-width: 60rem)").addEventListener("change", () => this.close());
  }

  draw() {
    const nav = byId("list");
    if (nav.querySelector("input")) return; // a name is being written
    const focused = [...nav.querySelectorAll("button")].indexOf(document.activeElement);
    const query = this.search.value;
    const found = this.app.kept.list(query);
    const groups = Map.groupBy ? Map.groupBy(found, (one) => when(one.updated)) : grouped(found);
    nav.replaceChildren(
      ...[...groups].map(([name, conversations]) =>
        el("section", {}, el("h2", {}, name), el("ul", {}, ...conversations.map((one) => this.item(one)))),
      ),
    );
    if (!found.length)
      nav.append(el("p", { class: "note" }, query ? "Nothing has these words." : "What you say stays in this browser."));
    nav.querySelectorAll("button")[focused]?.focus();
  }

  item(conversation) {
    const title = titleOf(conversation);
    const here = conversation.id === this.app.conversation.id;
    const open = el(
      "button",
      {
        type: "button",
        class: "open",
        "aria-current": here ? "page" : null,
        title,
        onclick: () => {
          this.app.open(conversation.id);
          this.close();
        },
      },
      title,
    );
    const line = el(
      "li",
      {},
      open,
      iconButton(`Rename: ${title}`, "edit", () => this.rename(line, conversation)),
      iconButton(`Delete: ${title}`, "delete", () => this.remove(conversation)),
    );
    return line;
  }

  rename(line, conversation) {
    const field = el("input", { type: "text", "aria-label": "Name of the conversation", maxlength: 120 });
    field.value = titleOf(conversation);
    let over = false;
    const finish = async (take) => {
      if (over) return;
      over = true;
      if (take && field.value.trim() !== titleOf(conversation)) {
        conversation.title = field.value.trim();
        await this.app.kept.save(conversation);
      }
      field.remove();
      this.app.drawTitle();
      this.draw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        finish(false);
      }
    });
    field.addEventListener("blur", () => finish(true));
    line.replaceChildren(field);
    field.focus();
    field.select();
  }

  async remove(conversation) {
    this.app.stop(conversation);
    await this.app.kept.remove(conversation.id);
    if (conversation.id === this.app.conversation.id) this.app.begin();
    else this.draw();
    toast(`“${titleOf(conversation)}” is deleted.`, {
      name: "Undo",
      run: async () => {
        await this.app.kept.save(conversation);
        this.app.open(conversation.id);
      },
    });
  }

  export() {
    const file = new Blob([this.app.kept.exported()], { type: "application/json" });
    const address = URL.createObjectURL(file);
    const day = new Date().toISOString().slice(0, 10);
    el("a", { href: address, download: `foundling-conversations-${day}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  async import() {
    const input = byId("import-file");
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const added = await this.app.kept.import(file);
      this.app.reopen();
      this.draw();
      toast(added === 1 ? "One conversation is new." : `${added} conversations are new.`);
    } catch (error) {
      toast(error.message);
    }
  }

  get isOpen() {
    return document.body.classList.contains("drawn");
  }

  open() {
    document.body.classList.add("drawn");
    byId("stage").inert = true;
    byId("open-drawer").setAttribute("aria-expanded", "true");
    byId("close-drawer").focus();
  }

  close() {
    if (!this.isOpen) return;
    document.body.classList.remove("drawn");
    byId("stage").inert = false;
    byId("open-drawer").setAttribute("aria-expanded", "false");
    byId("open-drawer").focus();
  }
}

/** Map.groupBy for browsers of before 2024. */
function grouped(conversations) {
  const groups = new Map();
  for (const one of conversations) {
    const name = when(one.updated);
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  return groups;
}
