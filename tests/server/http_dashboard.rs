//! `dashboard`: the page, its parts and its requests; and the page in a browser, where one is installed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::browser::{browser, look};
use crate::support::devtools::Page;
use crate::support::{Backend, Driver, Response, Server, Serving, Setup, skip, with_each_driver};

with_each_driver!(
    the_page_and_its_parts_are_served_with_a_strict_policy,
    a_part_that_has_not_changed_is_not_sent_again,
    nothing_else_is_below_the_location,
    figures_are_those_of_the_api,
    servers_are_changed_only_where_that_is_allowed,
    a_page_of_another_site_changes_nothing,
    a_group_whose_name_has_a_slash_can_be_changed,
    access_rules_hold_for_all_of_it,
    a_browser_shows_the_traffic_and_names_as_text,
    a_server_is_drained_and_weighed_by_keyboard,
    the_page_is_readable_in_the_dark_on_a_phone_and_by_a_screen_reader,
);

/// Ends a test that hangs.
const DEADLINE: Duration = Duration::from_secs(120);

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' \
                      data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Parts of the page, with their paths below the location.
const PARTS: [(&str, &str); 8] = [
    ("", "text/html; charset=utf-8"),
    ("main.js", "text/javascript; charset=utf-8"),
    ("sections.js", "text/javascript; charset=utf-8"),
    ("figures.js", "text/javascript; charset=utf-8"),
    ("table.js", "text/javascript; charset=utf-8"),
    ("chart.js", "text/javascript; charset=utf-8"),
    ("style.css", "text/css; charset=utf-8"),
    ("icon.svg", "image/svg+xml"),
];

const SITE: &str = "server { listen %UNIX%; status_zone site; location / { return 200 hello; }
     location /dashboard/ { dashboard; } location /changing/ { dashboard write=on; } }";

fn ask(server: &Server, method: &str, path: &str, fields: &str, body: &str) -> Response {
    let length = body.len();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n{fields}\r\n{body}");
    server.connect().ask(request)
}

fn json_of(response: &Response) -> Value {
    assert_eq!(response.header("Content-Type"), Some("application/json"), "{response:?}");
    serde_json::from_slice(&response.body).expect("JSON")
}

fn the_page_and_its_parts_are_served_with_a_strict_policy(driver: Driver) {
    let server = Setup::http(driver, SITE).start();
    for (name, content_type) in PARTS {
        let response = server.get(&format!("/dashboard/{name}"));
        assert_eq!((response.status, response.header("Content-Type")), (200, Some(content_type)), "{name}");
        assert_eq!(response.header("Content-Security-Policy"), Some(POLICY), "{name}");
        assert_eq!(response.header("X-Content-Type-Options"), Some("nosniff"));
        assert_eq!(response.header("Referrer-Policy"), Some("no-referrer"));
        assert_eq!(response.header("Cache-Control"), Some("no-cache"));
        let text = response.text();
        // No part is loaded from other sites, violates the policy or turns text into markup. The namespace of SVG is an
        // exception.
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for word in ["http:", "https:", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", " style="] {
            assert!(!text.contains(word), "{name} has {word}");
        }
        let head = server.connect().ask(format!("GET /dashboard/{name} HTTP/1.0\r\n\r\n"));
        assert_eq!(head.body.len(), response.body.len());
    }
    let page = server.get("/dashboard/");
    for (name, _) in PARTS.iter().filter(|(name, _)| ["main.js", "style.css", "icon.svg"].contains(name)) {
        assert!(page.text().contains(&format!("\"{name}\"")), "{name}");
    }
    let redirect = server.get("/dashboard");
    assert_eq!(redirect.status, 301);
    assert!(redirect.header("Location").is_some_and(|location| location.ends_with("/dashboard/")), "{redirect:?}");
    server.stop();
}

fn a_part_that_has_not_changed_is_not_sent_again(driver: Driver) {
    let server = Setup::http(driver, SITE).start();
    let mut tags = Vec::new();
    for (name, _) in PARTS {
        let path = format!("/dashboard/{name}");
        let tag = server.get(&path).header("ETag").expect("a tag").to_owned();
        let again = ask(&server, "GET", &path, &format!("If-None-Match: {tag}\r\n"), "");
        assert_eq!((again.status, again.body.len(), again.header("ETag")), (304, 0, Some(tag.as_str())));
        let other = ask(&server, "GET", &path, "If-None-Match: \"other\"\r\n", "");
        assert_eq!((other.status, other.body.is_empty()), (200, false));
        tags.push(tag);
    }
    tags.sort();
    tags.dedup();
    assert_eq!(tags.len(), PARTS.len(), "each has its own");
    server.stop();
}

fn nothing_else_is_below_the_location(driver: Driver) {
    let server = Setup::http(driver, SITE).start();
    let paths =
        ["none", "index.html", "main.js/", "main.js.map", "page/main.js", "figures/", "api", "MAIN.JS", "%2e%2e%2fx"];
    for name in paths {
        let response = server.get(&format!("/dashboard/{name}"));
        let expected = if name.starts_with("%2e") { (200, true) } else { (404, false) };
        assert_eq!((response.status, response.text() == "hello"), expected, "{name}");
    }
    for (method, path) in [("POST", ""), ("PUT", "main.js"), ("DELETE", "style.css"), ("POST", "figures")] {
        assert_eq!(ask(&server, method, &format!("/dashboard/{path}"), "", "").status, 405, "{method} {path}");
    }
    server.stop();
}

fn figures_are_those_of_the_api(driver: Driver) {
    let server = Setup::http(driver, SITE).start();
    server.get("/");
    let end = Instant::now() + DEADLINE;
    let figures = loop {
        let response = server.get("/dashboard/figures");
        assert_eq!(response.header("Cache-Control"), Some("no-cache"));
        assert_eq!(response.header("X-Content-Type-Options"), Some("nosniff"));
        let figures = json_of(&response);
        if figures["http/server_zones"]["site"]["responses"]["codes"]["200"].as_u64() > Some(1) {
            break figures;
        }
        assert!(Instant::now() < end, "{figures:#}");
    };
    // The same structure as at its own path; numbers may have changed since.
    let kinds = |value: &Value| value.as_object().map(|fields| fields.keys().cloned().collect::<Vec<_>>());
    let all = figures.as_object().expect("an object");
    for (path, told) in all.iter().filter(|(path, _)| *path != "write") {
        let own = json_of(&server.get(&format!("/dashboard/api/9/{path}")));
        assert_eq!((kinds(told), told.is_array()), (kinds(&own), own.is_array()), "{path}");
    }
    assert!(all.len() >= 16 && !all.contains_key("stream/upstreams"), "{:?}", kinds(&figures));
    assert_eq!(figures["write"], false);
    assert_eq!(json_of(&server.get("/changing/figures"))["write"], true);
    assert_eq!(json_of(&server.get("/dashboard/api/9/http/server_zones?fields=")), json!(["site"]));
    assert_eq!(server.get("/dashboard/api/10").status, 404);
    server.stop();
}

fn servers_are_changed_only_where_that_is_allowed(driver: Driver) {
    let text = format!("upstream app {{ server 127.0.0.1:1; }} {SITE}");
    let server = Setup::http(driver, &text).start();
    let path = "api/9/http/upstreams/app/servers/0";
    let refused = ask(&server, "PATCH", &format!("/dashboard/{path}"), "", "{\"drain\":true}");
    assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (405, &json!("MethodDisabled")));
    let changed = ask(&server, "PATCH", &format!("/changing/{path}"), "", "{\"drain\":true,\"weight\":7}");
    assert_eq!((changed.status, &json_of(&changed)["drain"]), (200, &json!(true)));
    let peer = &json_of(&server.get("/dashboard/figures"))["http/upstreams"]["app"]["peers"][0];
    assert_eq!((&peer["state"], &peer["weight"]), (&json!("draining"), &json!(7)));
    server.stop();
}

/// A browser sends POST requests of any site with the user's credentials, but it names the site.
fn a_page_of_another_site_changes_nothing(driver: Driver) {
    let text = format!("upstream app {{ zone app 64k; server 127.0.0.1:1; }} {SITE}");
    let server = Setup::http(driver, &text).start();
    let path = "/changing/api/9/http/upstreams/app/servers";
    let post = |fields: &str| {
        let body = json!({ "server": format!("127.0.0.1:{}", 2 + fields.len()) }).to_string();
        ask(&server, "POST", path, fields, &body)
    };
    for fields in [
        "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\nOrigin: http://h\r\n",
        "Origin: https://elsewhere.example\r\n",
        "Origin: http://h.example\r\n",
        "Origin: null\r\n",
    ] {
        let refused = post(&format!("{fields}Content-Type: text/plain\r\n"));
        assert_eq!((refused.status, &json_of(&refused)["error"]["code"]), (403, &json!("CrossSite")), "{fields}");
    }
    // Reading is permitted, because the browser hides the answer from another site's page.
    assert_eq!(ask(&server, "GET", path, "Sec-Fetch-Site: cross-site\r\n", "").status, 200);
    for fields in ["", "Origin: http://h\r\n", "Sec-Fetch-Site: same-origin\r\nOrigin: http://proxy\r\n"] {
        assert_eq!(post(fields).status, 201, "{fields}");
    }
    let delete = format!("{path}/0");
    assert_eq!(ask(&server, "DELETE", &delete, "Origin: http://elsewhere\r\n", "").status, 403);
    server.stop();
}

fn a_group_whose_name_has_a_slash_can_be_changed(driver: Driver) {
    let text =
        format!("upstream a/b {{ zone z 64k; server 127.0.0.1:1; }} upstream a {{ server 127.0.0.1:2; }} {SITE}");
    let server = Setup::http(driver, &text).start();
    let servers = "/changing/api/9/http/upstreams/a%2Fb/servers";
    let changed = ask(&server, "PATCH", &format!("{servers}/0"), "", "{\"drain\":true}");
    assert_eq!((changed.status, &json_of(&changed)["server"]), (200, &json!("127.0.0.1:1")));
    let figures = json_of(&server.get("/changing/figures"));
    let state = |group: &str| figures["http/upstreams"][group]["peers"][0]["state"].clone();
    assert_eq!((state("a/b"), state("a")), (json!("draining"), json!("up")));
    assert_eq!(json_of(&server.get("/changing/api/9/http/upstreams/a%2Fb?fields=zone")), json!({ "zone": "a/b" }));
    // `Location` names the new server by a path that can be requested.
    let added = ask(&server, "POST", &format!("{servers}/?x"), "", "{\"server\":\"127.0.0.1:3\"}");
    let place = added.header("Location").expect("a place").to_owned();
    assert!(added.status == 201 && place.ends_with(&format!("{servers}/1")), "{added:?}");
    assert_eq!(json_of(&server.get(&format!("{servers}/1")))["server"], "127.0.0.1:3");
    assert_eq!(server.get("/changing/api/9/http/upstreams/a/b/servers").status, 404);
    server.stop();
}

fn access_rules_hold_for_all_of_it(driver: Driver) {
    let text = "server { listen %UNIX%; listen %TCP%;
         location /dashboard/ { dashboard; allow unix:; deny all; } }";
    let server = Setup::http(driver, text).start();
    for path in ["", "main.js", "figures", "api/9/nginx", "none"] {
        let path = format!("/dashboard/{path}");
        let expected = if path.ends_with("none") { 404 } else { 200 };
        assert_eq!((server.get(&path).status, server.connect_tcp(1).get(&path).status), (expected, 403), "{path}");
    }
    assert_eq!(server.get("/other/").status, 404, "nothing is told where nobody asked for it");
    server.stop();
}

/// A backend that answers every request.
fn answering() -> Serving {
    Backend::tcp().serve(|_, client| client.try_send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").is_ok())
}

/// Text that would become an element and write to the console if it were parsed as markup.
const HOSTILE: &str = "<img src=x onerror=console.error(86420)>\\\"'&lt;b id=hostile>";

fn a_browser_shows_the_traffic_and_names_as_text(driver: Driver) {
    let Some(browser) = browser() else {
        return skip("no Chromium that works is installed");
    };
    let backend = answering();
    let text = format!(
        "upstream \"{HOSTILE}\" {{ server {}; }}
         server {{ listen %TCP%; status_zone site-of-the-test;
             location / {{ status_zone \"{HOSTILE}\"; proxy_pass \"http://{HOSTILE}\"; }}
             location /dashboard/ {{ dashboard write=on; }} }}",
        backend.address
    );
    let server = Setup::http(driver, &text).start();
    let mut client = server.connect_tcp(1);
    (0..7).for_each(|_| assert_eq!(client.get("/").status, 200));
    let url = format!("http://{}/dashboard/", server.directory.address(1));
    let end = Instant::now() + DEADLINE;
    // The page updates twice in this time; a loop's counters may be updated after its answer.
    let page = loop {
        let (page, console) = look(browser, &url, &[]).unwrap_or_else(|error| panic!("{error}"));
        // Browsers may have messages of their own, which depend on the version.
        let is_trouble = |line: &&str| line.contains(&url) && TROUBLE.iter().any(|word| line.contains(word));
        let trouble: Vec<&str> = console.lines().filter(is_trouble).collect();
        assert!(trouble.is_empty(), "the page has trouble: {trouble:#?}");
        if row(&page, "site-of-the-test").is_some_and(|cells| requests(&cells) > 7) {
            break page;
        }
        assert!(Instant::now() < end, "{page}");
    };
    let name = HOSTILE.replace("\\\"", "\"");
    let escaped = name.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    assert!(!page.contains("<img") && !page.contains("<b id"), "{page}");
    assert!(page.contains(&format!("<h3>{escaped}</h3>")), "the group: {page}");
    assert!(row(&page, &escaped).is_some_and(|cells| cells[2] == "7"), "the location: {page}");
    let peer = row(&page, &backend.address).expect("the server of the group");
    assert_eq!(peer[1], "up", "{peer:?}");
    assert!(page.contains(&format!("aria-label=\"Drain {}\"", backend.address)), "what can be changed has a button");
    server.stop();
}

fn a_server_is_drained_and_weighed_by_keyboard(driver: Driver) {
    let Some(browser) = browser() else {
        return skip("no Chromium that works is installed");
    };
    let text = "upstream app { zone app 64k; server 127.0.0.1:1; server 127.0.0.1:2 weight=3; }
        server { listen %TCP%; status_zone site; location /dashboard/ { dashboard write=on; } }";
    let server = Setup::http(driver, text).start();
    let mut page = Page::open(browser, &format!("http://{}/dashboard/", server.directory.address(1))).unwrap();
    let labelled = |label: &str| format!("document.querySelector('[aria-label=\"{label}\"]')");
    page.wait_until(&labelled("Drain 127.0.0.1:2"));
    page.tab_to("Drain 127.0.0.1:2");
    page.press("Enter", 13, "\r");
    page.wait_until(&labelled("Undrain 127.0.0.1:2"));
    let peer = |server: &Server| {
        let response = server.connect_tcp(1).get("/dashboard/api/9/http/upstreams/app?fields=peers");
        json_of(&response)["peers"][1].clone()
    };
    assert_eq!((&peer(&server)["state"], &peer(&server)["weight"]), (&json!("draining"), &json!(3)));
    // The focus has stayed, and the field beside it accepts a number.
    assert_eq!(page.evaluate("document.activeElement.getAttribute('aria-label')"), "Undrain 127.0.0.1:2");
    page.press("Tab", 9, "");
    assert_eq!(page.evaluate("document.activeElement.getAttribute('aria-label')"), "Weight of 127.0.0.1:2");
    page.press("7", 55, "7");
    assert_eq!(page.evaluate("document.activeElement.value"), "7");
    page.press("Enter", 13, "\r");
    page.wait_until("document.getElementById('state').textContent.includes('is changed')");
    page.wait_until(&format!("{}.value === '7'", labelled("Weight of 127.0.0.1:2")));
    let end = Instant::now() + DEADLINE;
    while peer(&server)["weight"] != 7 {
        assert!(Instant::now() < end, "{:#}", peer(&server));
    }
    page.tab_to("Undrain 127.0.0.1:2");
    page.press(" ", 32, " ");
    page.wait_until(&labelled("Drain 127.0.0.1:2"));
    assert_eq!(peer(&server)["state"], "up");
    drop(page);
    server.stop();
}

fn the_page_is_readable_in_the_dark_on_a_phone_and_by_a_screen_reader(driver: Driver) {
    let Some(browser) = browser() else {
        return skip("no Chromium that works is installed");
    };
    let text = "upstream app { zone app 64k; server 127.0.0.1:1; }
        server { listen %TCP%; status_zone a-long-name-of-a-zone-that-does-not-fit-into-a-narrow-window-at-all;
                 location /dashboard/ { dashboard write=on; } }";
    let server = Setup::http(driver, text).start();
    let mut page = Page::open(browser, &format!("http://{}/dashboard/", server.directory.address(1))).unwrap();
    page.wait_until("document.querySelectorAll('tbody tr').length > 3");
    // The contrast formula of WCAG 2 with the colours of the page.
    let contrast = "(() => {
        const style = getComputedStyle(document.body);
        const light = (color) => {
          const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
          const linear = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
          return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
        };
        const [text, ground] = [light(style.color), light(style.backgroundColor)];
        return [(Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05), text > ground];
      })()";
    for (scheme, is_dark) in [("light", false), ("dark", true)] {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        page.call("Emulation.setEmulatedMedia", &json!({ "features": features }));
        let found = page.evaluate(contrast);
        assert!(found[0].as_f64() >= Some(7.0) && found[1] == is_dark, "{scheme}: {found}");
    }
    // Elements wider than the window scroll by themselves, and the page does not.
    let phone = json!({ "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true });
    page.call("Emulation.setDeviceMetricsOverride", &phone);
    page.wait_until("window.innerWidth === 360");
    let width = page.evaluate("document.documentElement.scrollWidth").as_u64();
    assert!(width <= Some(360), "the page is {width:?} wide");
    let is_wide = "[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)";
    assert_eq!(page.evaluate(is_wide), true);
    // Every control has an accessible name.
    let tree = page.call("Accessibility.getFullAXTree", &json!({}));
    let nodes = tree["nodes"].as_array().expect("a tree");
    let used = ["button", "spinbutton", "searchbox", "combobox", "textbox", "link", "region", "table", "image"];
    let used: Vec<&Value> = nodes
        .iter()
        .filter(|node| node["ignored"] == false && used.iter().any(|role| node["role"]["value"] == *role))
        .collect();
    assert!(used.len() > 8, "{used:#?}");
    for node in &used {
        assert!(node["name"]["value"].as_str().is_some_and(|name| !name.is_empty()), "{node:#}");
    }
    let has =
        |role: &str, name: &str| used.iter().any(|node| node["role"]["value"] == role && node["name"]["value"] == name);
    assert!(has("button", "Drain 127.0.0.1:1") && has("spinbutton", "Weight of 127.0.0.1:1"), "{used:#?}");
    drop(page);
    server.stop();
}

/// Number of requests in a row of a zone, including those for the page itself.
fn requests(cells: &[String]) -> u64 {
    cells[2].replace(',', "").parse().unwrap_or_default()
}

/// Words in the console's messages about a page that violates its policy, lacks a part or has a fault; or that has
/// parsed [`HOSTILE`].
const TROUBLE: [&str; 6] =
    ["Content Security Policy", "Refused to ", "Failed to load ", "Uncaught ", "Unhandled ", "86420"];

/// Contents of the cells in the row with this name, as HTML.
fn row(page: &str, name: &str) -> Option<Vec<String>> {
    let row = page.split("<tr>").find(|row| {
        let first = row.split_once("</th>").map(|(first, _)| text_of(first));
        row.starts_with("<th scope=\"row\"") && first.as_deref() == Some(name)
    })?;
    let row = row.split("</tr>").next()?;
    Some(row.split_inclusive("</th>").flat_map(|part| part.split("</td>")).map(text_of).collect())
}

/// Text without markup.
fn text_of(html: &str) -> String {
    let parts = html.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text));
    parts.collect::<String>().trim().to_owned()
}
