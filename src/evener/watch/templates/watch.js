// A page that goes on: pieces of it come as they change, in one stream, which is closed while nobody sees the page.
(() => {
  "use strict";
  const main = document.querySelector("main"), gone = document.getElementById("gone");
  const axis = document.getElementById("axis"), picked = new Set();
  const SILENT_MS = 40000, ASK_MS = 15000; // the server says something every 15 s
  let stream = null, heard = 0, asking = 0;

  function address(path) {
    const query = new URLSearchParams(location.search);
    query.set("page", location.pathname);
    if (axis) query.set("axis", axis.value);
    return `${path}?${query}`;
  }

  // --- what comes ---

  // What somebody has opened, ticked or stands on stays so.
  function put(place, html) {
    const open = [...place.querySelectorAll("details[open][data-keep]")].map((one) => one.dataset.keep);
    const on = place.contains(document.activeElement) ? document.activeElement : null;
    const at = on && [...place.querySelectorAll(on.tagName)].indexOf(on);
    const scrolled = [...place.querySelectorAll("[tabindex]")].map((one) => [one.scrollTop, one.scrollLeft]);
    place.innerHTML = html;
    place.hidden = !html;
    for (const details of place.querySelectorAll("details[data-keep]")) details.open = open.includes(details.dataset.keep);
    for (const box of place.querySelectorAll("[data-pick]")) box.checked = picked.has(box.dataset.pick);
    [...place.querySelectorAll("[tabindex]")].forEach((one, i) => scrolled[i] && one.scrollTo(scrolled[i][1], scrolled[i][0]));
    if (on) [...place.querySelectorAll(on.tagName)][at]?.focus({ preventScroll: true });
  }

  function tell(status) {
    document.title = status.title;
    const icon = document.getElementById("icon");
    if (!icon.href.endsWith(`/${status.mark}.svg`)) icon.href = `/static/${status.mark}.svg`;
    if (status.state === main.dataset.word) return;
    main.dataset.word = status.state;
    document.getElementById("aloud").textContent = status.message;
    if (!/finished|failed|stopped|hung/.test(status.state)) return;
    if (document.getElementById("notify").checked && Notification.permission === "granted") new Notification(status.title, { body: status.message });
    if (document.getElementById("sound").checked) beep();
  }

  function beep() {
    const audio = new AudioContext(), tone = audio.createOscillator(), loud = audio.createGain();
    loud.gain.setValueAtTime(0.15, audio.currentTime);
    loud.gain.exponentialRampToValueAtTime(0.001, audio.currentTime + 0.6);
    tone.frequency.value = 660;
    tone.connect(loud).connect(audio.destination);
    tone.start();
    tone.stop(audio.currentTime + 0.6);
    tone.onended = () => audio.close();
  }

  function lost(text) {
    gone.textContent = text;
    gone.hidden = !text;
    if (!text) return;
    document.title = `⚠ not up to date · ${document.title.replace(/^⚠ not up to date · /, "")}`;
    document.getElementById("icon").href = "/static/warn.svg";
  }

  // --- the stream ---

  function open() {
    close();
    heard = Date.now();
    stream = new EventSource(address("/stream"));
    stream.onmessage = ({ data }) => {
      const news = JSON.parse(data);
      heard = Date.now();
      lost("");
      if (news.assets !== main.dataset.assets) return location.reload(); // another evener
      tell(news);
      for (const [name, html] of Object.entries(news.pieces)) {
        const place = document.querySelector(`[data-piece="${CSS.escape(name)}"]`);
        if (place) put(place, html);
      }
      main.dataset.seen = Number(main.dataset.seen ?? 0) + 1;
    };
    stream.addEventListener("alive", () => { heard = Date.now(); });
    stream.onerror = () => {
      lost("The page’s server is not there. What you see is how it was; it goes on when evener watch does. The run is not touched by this.");
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => { if (!document.hidden) open(); }, 3000);
    };
  }

  function close() {
    stream?.close();
    stream = null;
  }

  // Hidden, it asks now and then how the run is, for the tab's title and for whoever wants to be told.
  async function ask() {
    try {
      const answer = await fetch(address("/status"));
      if (answer.ok) tell(await answer.json());
    } catch {
      // it is asked again
    }
  }

  function look() {
    clearInterval(asking);
    if (document.hidden) {
      close();
      asking = setInterval(ask, ASK_MS);
    } else {
      open();
      asking = setInterval(() => { if (Date.now() - heard > SILENT_MS) open(); }, 5000);
    }
  }
  document.addEventListener("visibilitychange", look);
  look();

  // --- what can be done ---

  axis?.addEventListener("change", open);

  document.getElementById("notify").addEventListener("change", async (event) => {
    if (!event.target.checked) return;
    if (!("Notification" in window) || (await Notification.requestPermission()) !== "granted") event.target.checked = false;
  });

  const answer = document.getElementById("answer"), sure = document.getElementById("sure");
  async function act(what) {
    answer.textContent = "…";
    try {
      const reply = await fetch(`${location.pathname}/${what}`, { method: "POST", headers: { "x-evener": "1" } });
      answer.textContent = (await reply.json()).message;
    } catch {
      answer.textContent = "the page’s server is not there";
    }
  }
  document.getElementById("actions")?.addEventListener("click", ({ target }) => {
    if (target.dataset.action === "stop") sure.showModal();
    if (target.dataset.action === "save" || target.dataset.action === "sample") act(target.dataset.action);
  });
  sure?.addEventListener("click", ({ target }) => {
    if (!target.dataset.sure) return;
    sure.close();
    if (target.dataset.sure === "yes") act("stop");
  });

  const compare = document.getElementById("compare");
  document.addEventListener("change", ({ target }) => {
    if (!target.dataset.pick) return;
    picked[target.checked ? "add" : "delete"](target.dataset.pick);
    compare.disabled = picked.size < 2;
  });
  compare?.addEventListener("click", () => {
    location.href = `/compare?${new URLSearchParams([...picked].map((key) => ["run", key]))}`;
  });
})();
