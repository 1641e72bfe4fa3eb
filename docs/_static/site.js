// What the theme leaves to those who use the site without a mouse or with a screen reader, and the
// box that finds an error message by its words.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre, .table-wrapper")) block.tabIndex = 0; // scrolls
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const [id, name] of [["__navigation", "Pages"], ["__toc", "On this page"]]) {
    for (const opener of document.querySelectorAll(`label[for=${id}]:not(.overlay)`)) {
      opener.tabIndex = 0;
      opener.setAttribute("role", "button");
      opener.setAttribute("aria-label", name);
      opener.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        document.getElementById(id).click();
      });
    }
  }

  const list = [...document.querySelectorAll(".messages dt")];
  if (!list.length) return;
  const words = (text) => text.toLowerCase().match(/[\p{L}_]{2,}/gu) ?? [];
  const entries = list.map((term) => {
    const own = new Set(words(term.textContent));
    return { term, own };
  });
  const frequency = new Map();
  for (const { own } of entries)
    for (const word of own) frequency.set(word, (frequency.get(word) ?? 0) + 1);
  const weight = (word) => 1 / (frequency.get(word) ?? Infinity);

  const label = document.createElement("label");
  label.textContent = "Find a message: paste it, or type some of its words";
  const box = document.createElement("input");
  box.id = "find-message";
  box.type = "search";
  label.htmlFor = box.id;
  const found = document.createElement("dl");
  found.className = "messages";
  const status = document.createElement("p");
  status.setAttribute("role", "status");
  document.querySelector("h1").parentElement.querySelector("section").before(label, box, status, found);

  box.addEventListener("input", () => {
    const typed = new Set(words(box.value));
    const known = [...typed].filter((word) => frequency.has(word));
    const share = ({ own }) => {
      let both = 0, all = 0;
      for (const word of own) all += weight(word);
      for (const word of known) if (own.has(word)) both += weight(word);
      return both / Math.sqrt(all || 1);
    };
    const best = entries.map((entry) => ({ entry, score: share(entry) }))
      .filter(({ score }) => score > 0).sort((a, b) => b.score - a.score).slice(0, 5);
    status.textContent = !typed.size ? "" : best.length ? `The ${best.length} nearest:` : "None has these words.";
    found.replaceChildren(...best.flatMap(({ entry: { term } }) => {
      const answer = term.nextElementSibling.cloneNode(true);
      const message = term.cloneNode(true);
      return [message, answer];
    }));
  });
});
