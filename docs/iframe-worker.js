// Lets the search work on pages that are opened from a folder: browsers allow no worker there, so the search's script
// runs in a hidden frame. MkDocs' offline plugin looks for a file with this name before it names one on another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "";
      this.ready = new Promise((done) => frame.addEventListener("load", done, { once: true })).then(() => {
        this.inside = frame.contentWindow;
        this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        this.inside.importScripts = async (...urls) => {
          for (const next of urls) await this.load(next);
        };
        return this.load(url);
      });
      document.body.append(frame);
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
