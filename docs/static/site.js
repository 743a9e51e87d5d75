/** Copy buttons, and a search that shows texts from disk too, in the language of the page. */

document.addEventListener("DOMContentLoaded", () => {
  const isChinese = document.documentElement.lang.startsWith("zh");
  for (const block of document.querySelectorAll("div.highlight")) addCopyButton(block, isChinese);
  if (typeof Search !== "undefined") improveSearch();
  for (const form of document.querySelectorAll(".sidebar-search-container")) {
    if (!isChinese) continue;
    form.querySelector("input").placeholder = "搜索";
    form.append(Object.assign(document.createElement("input"), { type: "hidden", name: "lang", value: "zh" }));
  }
});

function addCopyButton(block, isChinese) {
  const [copy, copied] = isChinese ? ["复制", "已复制"] : ["Copy", "Copied"];
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: copy });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("pre").textContent);
    button.textContent = copied;
    setTimeout(() => { button.textContent = copy; }, 1500);
  });
  block.append(button);
}

function improveSearch() {
  // Pages on disk cannot fetch other pages, so that their texts come from a script.
  if (location.protocol === "file:") {
    const texts = new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = "_static/texts.js";
      script.onload = () => resolve(window.siteTexts);
      document.head.append(script);
    });
    window.fetch = async (address) => {
      const name = address.slice(document.documentElement.dataset.content_root.length).replace(/\.html$/, "");
      return new Response((await texts)[name] ?? "");
    };
  }
  const performSearch = Search._performSearch;
  Search._performSearch = (...query) => {
    const text = new URLSearchParams(location.search);
    const wantsChinese = text.get("lang") === "zh" || /[\u4e00-\u9fff]/.test(text.get("q") ?? "");
    const results = performSearch(...query);
    const own = results.filter(([page]) => page.endsWith(".zh") === wantsChinese);
    return own.length ? own : results;
  };
}
