//! The reference pages generated from the directive tables: they match the program, or these tests fail.
//! `GALE_GOLDEN=write` writes them again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{self, Directory, Driver, Server, Setup};

/// Prefix of the names that exist for tests alone, which no page contains.
const OF_TESTS: &str = "test_";

fn directives(words: &[&str]) -> String {
    let output = support::binary(false).arg("directives").args(words).output().expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn workspace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

/// Compares a file with its expected content, or writes it.
fn settle(path: &Path, expected: &str) {
    if std::env::var_os("GALE_GOLDEN").is_some_and(|value| value == "write") {
        fs::create_dir_all(path.parent().expect("a file")).expect("a directory");
        fs::write(path, expected).expect("written");
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    let differing = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(found == expected, "{} is out of date: GALE_GOLDEN=write writes it; {differing:?}", path.display());
}

#[test]
fn the_reference_is_that_of_the_program() {
    let directory = Directory::new();
    directives(&["--pages", directory.path().to_str().expect("text")]);
    let mut pages: BTreeMap<String, String> = BTreeMap::new();
    for entry in fs::read_dir(directory.path()).expect("it was made") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a file").to_str().expect("text").to_owned();
        if !name.contains(OF_TESTS) {
            let text = fs::read_to_string(&path).expect("a page");
            let of_tests = format!("| [`{OF_TESTS}");
            pages.insert(name, text.lines().filter(|line| !line.starts_with(&of_tests)).map(with_end).collect());
        }
    }
    let folder = workspace("docs/reference");
    for (name, text) in &pages {
        settle(&folder.join(name), text);
    }
    for entry in fs::read_dir(&folder).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("text");
        assert!(pages.contains_key(&name), "docs/reference/{name} is of no module");
    }
}

#[test]
fn links_of_the_reference_lead_somewhere() {
    let folder = workspace("docs/reference");
    let mut links = 0;
    for entry in fs::read_dir(&folder).expect("a folder") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("a page");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("https://") {
                continue;
            }
            let (page, anchor) = link.split_once('#').unwrap_or((link, ""));
            let page = fs::read_to_string(folder.join(page)).unwrap_or_else(|error| panic!("{link}: {error}"));
            assert!(anchor.is_empty() || anchors(&page).any(|known| known == anchor), "{link} leads nowhere");
            links += 1;
        }
    }
    assert!(links > 500, "{links}");
}

/// Anchors of a page's headings.
fn anchors(page: &str) -> impl Iterator<Item = String> {
    page.lines().filter(|line| line.starts_with('#')).map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | ' '));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

#[test]
fn the_manual_page_is_that_of_the_program() {
    let (mut page, mut is_of_tests) = (String::new(), false);
    for line in directives(&["--man"]).lines() {
        if line.starts_with(".Ss") || line.starts_with(".Sh") {
            is_of_tests = line.contains(OF_TESTS);
        }
        if !is_of_tests {
            page.push_str(&with_end(line));
        }
    }
    settle(&workspace("packaging/gale.conf.5"), &page);
}

fn with_end(line: &str) -> String {
    format!("{line}\n")
}

/// The value at this path of the server's API.
fn told(server: &Server, path: &str) -> Value {
    let response = server.get(&format!("/api/9{path}"));
    assert_eq!(response.status, 200, "{path}");
    serde_json::from_slice(&response.body).expect("JSON")
}

#[test]
fn the_api_s_description_has_its_paths_and_the_names_of_its_fields() {
    let text = "upstream group { zone group 1m; queue 1; server 127.0.0.1:1; }
        limit_req_zone $uri zone=requests:1m rate=1r/s; limit_conn_zone $uri zone=connections:1m;
        proxy_cache_path %DIR%/cache keys_zone=cache:1m;
        resolver 127.0.0.1 status_zone=resolver;
        server { listen %UNIX%; status_zone server;
            location / { status_zone location; return 200; }
            location /limited { limit_req zone=requests; limit_conn connections 1; proxy_cache cache;
            proxy_pass http://group; }
            location /api/ { api; } } }
        stream { upstream group { zone streams 1m; server 127.0.0.1:1; }
            limit_conn_zone $remote_addr zone=sessions:1m;
            server { listen unix:%DIR%/stream; status_zone stream; limit_conn sessions 1; proxy_pass group; }";
    let server = Setup::http(Driver::Epoll, text).start();
    assert_eq!(server.get("/").status, 200);
    let page = fs::read_to_string(workspace("docs/api.yaml")).expect("a description");
    let mut paths = BTreeSet::new();
    for root in told(&server, "/").as_array().expect("a list") {
        let root = format!("/{}", root.as_str().expect("a name"));
        match told(&server, &root) {
            // A directory.
            Value::Array(names) if names.iter().all(Value::is_string) && !names.is_empty() => {
                paths.extend(names.iter().map(|name| format!("{root}/{}", name.as_str().expect("a name"))));
            }
            _ => drop(paths.insert(root)),
        }
    }
    let described = page.lines().filter_map(|line| line.strip_prefix("  /")?.strip_suffix(':'));
    let described = described.filter(|path| !path.contains('{') && *path != "figures").map(|path| format!("/{path}"));
    assert_eq!(paths, described.collect(), "what the server has, and what docs/api.yaml has");
    let (_, schemas) = page.split_once("\n  schemas:\n").expect("schemas");
    for path in &paths {
        let (_, own) = page.split_once(&format!("\n  {path}:\n")).expect("it is described");
        let own = own.split("\n  /").next().expect("text");
        let mut known = String::new();
        gather(schemas, own, &mut known, &mut BTreeSet::new());
        // Gale's own figures have no schemas.
        if !path.starts_with("/gale/") {
            assert_names(path, &told(&server, path), &known);
        }
    }
    server.stop();
}

/// Appends `text`, and the schemas that it refers to.
fn gather(schemas: &str, text: &str, out: &mut String, seen: &mut BTreeSet<String>) {
    out.push_str(text);
    for name in text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
        if seen.insert(name.to_owned()) {
            let start = format!("    {name}:");
            let mut lines = schemas.lines().skip_while(|line| !line.starts_with(&start));
            let first = lines.next().unwrap_or_else(|| panic!("no schema {name}"));
            let rest: Vec<&str> = lines.take_while(|line| line.starts_with("     ")).collect();
            gather(schemas, &format!("{first}\n{}\n", rest.join("\n")), out, seen);
        }
    }
}

/// Checks that every field is described, except fields that are named after data.
fn assert_names(path: &str, value: &Value, known: &str) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| assert_names(path, item, known)),
        Value::Object(fields) => {
            // Names of a map's entries: from this configuration, a status, a bound.
            for (name, value) in fields {
                let is_described = known.contains(&format!("{name}: {{")) || known.contains(&format!(" {name}:\n"));
                let is_name = OWN_NAMES.contains(&&**name) || name.starts_with(|first: char| first.is_ascii_digit());
                assert!(is_described || is_name || name == "inf", "docs/api.yaml does not have \"{name}\" of {path}");
                assert_names(path, value, known);
            }
        }
        _ => {}
    }
}

/// Names in the configuration of the test.
const OWN_NAMES: &[&str] =
    &["group", "requests", "connections", "cache", "resolver", "server", "location", "stream", "streams", "sessions"];
