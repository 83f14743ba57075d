const main = document.querySelector("main"), said = document.querySelector("#said");
let seen = "";
function put(fresh) {
  if (fresh.length !== main.children.length) { main.replaceChildren(...fresh); return; }
  fresh.forEach((part, place) => {
    const old = main.children[place];
    if (old.outerHTML === part.outerHTML) return;
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    part.querySelectorAll("details").forEach((one, index) => { one.open = open[index] === true; });
    if (old.outerHTML !== part.outerHTML) old.replaceWith(part);
  });
}
async function look() {
  if (!document.hidden) {
    try {
      const headers = {"If-None-Match": seen};
      const answer = await fetch(location.pathname + "?part", {cache: "no-store", headers});
      if (answer.status === 200) {
        const inside = new DOMParser().parseFromString(await answer.text(), "text/html");
        put([...inside.body.children]);
        seen = answer.headers.get("ETag");
      }
      said.textContent = answer.ok || answer.status === 304 ? "" : "The page could not be drawn anew.";
    } catch (error) {
      said.textContent = "opd watch does not answer: this is how it was. Start it again to go on.";
    }
  }
  setTimeout(look, SECONDS);
}
setTimeout(look, SECONDS);
