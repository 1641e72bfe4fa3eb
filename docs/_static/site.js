// Keyboard and screen reader support that the theme lacks.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre, .table-wrapper")) block.tabIndex = 0; // scrolls
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const [id, name] of [["__navigation", "Pages"], ["__toc", "On this page"]]) {
    for (const opener of document.querySelectorAll(`label[for=${id}]:not(.overlay) .icon`)) {
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
});
