//! The layers of ARCHITECTURE.md: no cycle between crates, and none between the folders of a crate.
//!
//! A folder, or a file, directly under a crate's `src` is one node of the crate's graph. A large folder has a graph of
//! its own, of its direct members. Every path that begins with `crate::` or `super::` and leaves the node is an
//! edge; a name that `lib.rs` or `mod.rs` re-exports counts for its origin. Code under `#[cfg(test)]` does not count: a
//! test may use higher layers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter::Peekable;
use std::path::{Path, PathBuf};
use std::vec::IntoIter;

/// Uses that violate the layers. Each is a debt; an entry that is no longer needed has to be removed.
const ALLOWED: &[Allowed] = &[
    Allowed {
        in_crate: "runtime",
        from: &["environment"],
        to: &["driver", "executor", "inbox", "simulation", "time"],
        because: "it is the state of one loop, made of theirs, and by it they find each other on the loop's thread",
    },
    Allowed {
        in_crate: "runtime",
        from: &["driver", "pool"],
        to: &["simulation"],
        because: "the simulated world, which scripts use through all layers, answers here in place of the kernel",
    },
];

/// Every module of `from` may use every one of `to`.
struct Allowed {
    in_crate: &'static str,
    from: &'static [&'static str],
    to: &'static [&'static str],
    because: &'static str,
}

/// Modules that use each other in circles. Each knot is a debt; it names exactly the modules that are in its circles.
const KNOTS: &[Knot] = &[
    Knot {
        in_crate: "files",
        folder: "",
        of: &[
            "access_time",
            "file",
            "file_system",
            "mounts",
            "open",
            "page_cache",
            "read",
            "shared_reads",
            "simulated",
        ],
        because: "a file knows its file system, the kernel's or a simulated one, and both know its pages",
    },
    Knot {
        in_crate: "files",
        folder: "",
        of: &["growing", "writer"],
        because: "a writer and its readers are two ends of one state",
    },
    Knot {
        in_crate: "log",
        folder: "",
        of: &["about", "json"],
        because: "the subject of a message writes itself into a line of JSON",
    },
    Knot {
        in_crate: "log",
        folder: "",
        of: &["syslog", "syslog_stream", "writer"],
        because: "syslog is a destination of the writer's thread, and told through it",
    },
    Knot {
        in_crate: "spool",
        folder: "",
        of: &["state", "store"],
        because: "a write in flight ends in the state that began it",
    },
    Knot {
        in_crate: "tls",
        folder: "",
        of: &["commands", "load", "named", "settings", "verify"],
        because: "settings hold what each of them loads, and give each of them its rules",
    },
    Knot {
        in_crate: "tls",
        folder: "",
        of: &["client", "library", "managed", "ocsp", "server", "staple", "stream", "verify_server"],
        because: "to be cut: a responder is asked over a connection of the same kind that its answer is for",
    },
    Knot {
        in_crate: "upstream",
        folder: "",
        of: &["pool", "warm"],
        because: "warm connections are made by the pool that keeps them",
    },
    Knot {
        in_crate: "upstream",
        folder: "",
        of: &["balance", "health", "outliers", "peer", "peers", "retry_budget", "selection"],
        because: "a peer holds what each policy counts, and each policy reads the list of peers",
    },
    Knot {
        in_crate: "upstream",
        folder: "",
        of: &["plan", "registry", "resolving", "servers", "state", "state_file"],
        because: "to be cut: a group is planned from directives, from names and from its state file alike",
    },
    Knot {
        in_crate: "worker",
        folder: "",
        of: &["limit", "state"],
        because: "a counted connection holds its worker, which holds the limit",
    },
    Knot {
        in_crate: "http",
        folder: "request",
        of: &[
            "advance",
            "body",
            "configuration",
            "counting",
            "departure",
            "error_page",
            "exchange",
            "files",
            "filters",
            "outcome",
            "phases",
            "post_action",
            "request_body",
            "server_field",
            "subrequest",
            "transform",
            "tunnel",
        ],
        because: "to be cut: a request is one type of all parts, which each phase uses",
    },
    Knot {
        in_crate: "http",
        folder: "connection",
        of: &["beginning", "client", "handover", "http1", "place", "worker"],
        because: "to be cut: connections of both versions are one type",
    },
    Knot {
        in_crate: "http-upstream",
        folder: "caching",
        of: &["consult", "freshen", "opening", "receive", "serve", "stored"],
        because: "to be cut: a response that is not stored after all leads to another look into the cache",
    },
    Knot {
        in_crate: "modules",
        folder: "http",
        of: &["cache_rows", "upstream_rows"],
        because: "the rows of a proxied protocol include those of its cache",
    },
];

/// Every module of `of` may use every other one.
struct Knot {
    in_crate: &'static str,
    /// The large folder that they are in; empty for the crate's root.
    folder: &'static str,
    of: &'static [&'static str],
    because: &'static str,
}

/// Lines of a folder from which on it has a graph of its own.
const LARGE_FOLDER_LINES: usize = 4000;

/// The modules of a folder, the modules that each uses, and the files of each use.
type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[test]
fn folders_of_a_crate_are_in_no_circle() {
    let mut complaints = Vec::new();
    for name in crates() {
        let files = files_under(&workspace().join("crates").join(&name).join("src"));
        let mut graph = graph_of(&files, "");
        for allowed in ALLOWED.iter().filter(|allowed| allowed.in_crate == name) {
            assert!(!allowed.because.is_empty());
            for (from, to) in allowed.from.iter().flat_map(|from| allowed.to.iter().map(move |to| (from, to))) {
                if graph.get_mut(*from).and_then(|uses| uses.remove(*to)).is_none() {
                    complaints.push(format!("crates/{name}: `{from}` does not use `{to}`, so it need not be allowed"));
                }
            }
        }
        let large = large_folders(&files).into_iter().map(|folder| (graph_of(&files, &folder), folder));
        for (mut graph, folder) in [(graph, String::new())].into_iter().chain(large) {
            for knot in KNOTS.iter().filter(|knot| knot.in_crate == name && knot.folder == folder) {
                assert!(!knot.because.is_empty());
                let loose = untie(&mut graph, knot.of);
                complaints.extend(loose.map(|module| format!("crates/{name}/{folder}: `{module}` is in no knot")));
            }
            complaints
                .extend(circle(&graph).map(|circle| format!("crates/{name}/{folder}: {}", describe(&circle, &graph))));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn crates_use_those_that_the_table_allows() {
    let architecture = fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    let table = crate_table(&architecture);
    assert_eq!(table.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>(), crates(), "a row for every crate");
    for (name, allowed) in table {
        let manifest = fs::read_to_string(workspace().join("crates").join(&name).join("Cargo.toml")).unwrap();
        let found = dependencies(&manifest);
        assert!(found.is_subset(&allowed), "crates/{name} uses {found:?}; ARCHITECTURE.md allows {allowed:?}");
    }
}

#[test]
fn circle_is_found_with_its_files() {
    let found = |files: &[(&str, &str)]| {
        let files = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let graph = graph_of(&files.collect::<Vec<_>>(), "");
        circle(&graph).map(|circle| describe(&circle, &graph))
    };
    let circle = found(&[
        ("lib.rs", "pub mod a;\nmod b;\nmod c;\npub use c::inner::{Thing as Other, Unused};\n"),
        ("a/mod.rs", "use crate::b::B;\n"),
        ("a/deep/mod.rs", "fn f<'a>(_: &'a char) -> char { super::super::b::g('\"'); '/' }\n"),
        ("b.rs", "use std::fmt::{self, Debug};\nuse crate::{SOME, Other};\n"),
        ("c/mod.rs", "mod inner;\n"),
        ("c/inner.rs", "mod x { fn g() { super::super::super::a::h(r#\" \"crate::b \"#) } }\n"),
    ]);
    let expected = "a -> b (a/deep/mod.rs, a/mod.rs), b -> c (b.rs), c -> a (c/inner.rs)";
    assert_eq!(circle.as_deref(), Some(expected));

    let none = found(&[
        ("lib.rs", "mod a;\nmod b;\n"),
        ("a.rs", "use crate::b;\nfn f() { super::b::f(); crate::a::f() }\n"),
        (
            "b/mod.rs",
            "// crate::a\n/* crate::a /* */ crate::a */\nconst TEXT: &str = \"\\\" crate::a\";\n\
             #[cfg(test)]\nmod mock;\n#[cfg(test)]\n#[path = \"x\"]\nfn f() -> crate::a::A { crate::a::f() }\n\
             #[cfg(test)]\nmod tests { use super::super::a; mod deeper { use crate::a; } }\nuse self::own::a;\n",
        ),
        ("b/mock.rs", "use crate::a;\n"),
        ("b/mock/deeper.rs", "use crate::a;\n"),
        ("b/own.rs", "use super::super::b;\nuse super::a;\n"),
    ]);
    assert_eq!(none, None);
}

#[test]
fn circle_inside_a_folder_is_found_and_a_knot_allows_it() {
    let files = [
        ("lib.rs", "mod a;\n"),
        ("a/mod.rs", "mod b;\nmod c;\nmod d;\npub use self::c::inner::Thing;\nuse crate::other;\n"),
        ("a/b.rs", "use super::{Thing, d::{self, D}};\n"),
        ("a/c/inner.rs", "fn f() { crate::a::b::g::<u8>() }\n"),
        ("a/d.rs", "use std::fmt;\n"),
    ];
    let files = files.map(|(path, text)| (path.to_owned(), text.to_owned()));
    assert_eq!(circle(&graph_of(&files, "")), None);
    let mut graph = graph_of(&files, "a");
    let circle_in_a = circle(&graph).map(|circle| describe(&circle, &graph));
    assert_eq!(circle_in_a.as_deref(), Some("b -> c (a/b.rs), c -> b (a/c/inner.rs)"));
    assert!(graph["b"].contains_key("d"));

    let loose: Vec<&str> = untie(&mut graph, &["b", "c", "d"]).collect();
    assert_eq!(loose, ["d"], "it is in no circle, so the knot must not name it");
    assert_eq!(circle(&graph), None);
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn crates() -> BTreeSet<String> {
    let entries = fs::read_dir(workspace().join("crates")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Path and text of all Rust files in a folder.
fn files_under(root: &Path) -> Vec<(String, String)> {
    let (mut files, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                files.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files
}

/// Names of the large folders directly under `src`.
fn large_folders(files: &[(String, String)]) -> Vec<String> {
    let mut lines = BTreeMap::<&str, usize>::new();
    for (folder, text) in files.iter().filter_map(|(path, text)| Some((path.split_once('/')?.0, text))) {
        *lines.entry(folder).or_default() += text.lines().count();
    }
    lines.retain(|_, lines| *lines > LARGE_FOLDER_LINES);
    lines.into_keys().map(str::to_owned).collect()
}

/// Removes the uses between these modules, and returns those that were in none of their circles.
fn untie<'a>(graph: &mut Graph, knot: &'a [&'a str]) -> impl Iterator<Item = &'a str> + use<'a> {
    let of_knot = |name: &String| knot.contains(&name.as_str());
    let inner = graph.iter().filter(|(from, _)| of_knot(from)).map(|(from, uses)| {
        let uses = uses.keys().filter(|to| of_knot(to)).map(|to| (to.clone(), BTreeSet::new()));
        (from.clone(), uses.collect())
    });
    let inner: Graph = inner.collect();
    for (_, uses) in graph.iter_mut().filter(|(from, _)| of_knot(from)) {
        uses.retain(|to, _| !of_knot(to));
    }
    knot.iter().copied().filter(move |module| !reaches_itself(&inner, module))
}

fn reaches_itself(graph: &Graph, module: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![module]);
    while let Some(from) = next.pop() {
        for to in graph.get(from).into_iter().flat_map(BTreeMap::keys) {
            if to == module {
                return true;
            }
            if seen.insert(to) {
                next.push(to);
            }
        }
    }
    false
}

/// The uses between the modules directly under a folder; of the crate's root if it is empty.
fn graph_of(files: &[(String, String)], folder: &str) -> Graph {
    let folder: Vec<String> = folder.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let depth = folder.len();
    let inside = |path: &[String]| if path.starts_with(&folder) { path.get(depth).cloned() } else { None };
    let sources: Vec<(&str, Vec<String>, Source)> = files
        .iter()
        .map(|(path, text)| {
            let module = module_of(path);
            (path.as_str(), module.clone(), Source::read(text, module))
        })
        .collect();
    let test_modules: Vec<&Vec<String>> = sources.iter().flat_map(|(_, _, source)| &source.test_modules).collect();
    let is_test = |module: &[String]| test_modules.iter().any(|test| module.starts_with(test));
    let names: BTreeSet<String> = sources.iter().filter_map(|(_, module, _)| inside(module)).collect();
    let exports: BTreeMap<&String, &String> =
        sources.iter().filter(|(_, module, _)| *module == folder).flat_map(|(_, _, source)| &source.exports).collect();
    let mut graph = Graph::new();
    for (path, module, source) in sources.iter().filter(|(_, module, _)| !is_test(module)) {
        let Some(node) = inside(module) else { continue };
        let uses = graph.entry(node.clone()).or_default();
        for name in source.uses.iter().filter_map(|used| inside(used)) {
            let origin = if names.contains(&name) { Some(&name) } else { exports.get(&name).copied() };
            if let Some(origin) = origin.filter(|origin| **origin != node) {
                uses.entry(origin.clone()).or_default().insert((*path).to_owned());
            }
        }
    }
    graph
}

/// Module path of a file; empty for the crate root.
fn module_of(path: &str) -> Vec<String> {
    let path = path.strip_suffix(".rs").unwrap();
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" || path == "main" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
}

/// A shortest cycle, if there is any.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    let circles = graph.keys().filter_map(|start| {
        let mut ways = vec![vec![start.clone()]];
        let mut seen = BTreeSet::new();
        while !ways.is_empty() {
            let mut longer = Vec::new();
            for way in ways {
                for next in graph.get(way.last()?).into_iter().flat_map(BTreeMap::keys) {
                    if next == start {
                        return Some(way);
                    }
                    if seen.insert(next.clone()) {
                        longer.push(way.iter().cloned().chain([next.clone()]).collect());
                    }
                }
            }
            ways = longer;
        }
        None
    });
    circles.min_by_key(Vec::len)
}

fn describe(circle: &[String], graph: &Graph) -> String {
    let next = circle.iter().cycle().skip(1);
    let edges = circle.iter().zip(next).map(|(from, to)| {
        let files: Vec<&str> = graph[from][to].iter().map(String::as_str).collect();
        format!("{from} -> {to} ({})", files.join(", "))
    });
    edges.collect::<Vec<_>>().join(", ")
}

/// The uses and exports of a file.
#[derive(Default)]
struct Source {
    /// Paths from the crate's root.
    uses: BTreeSet<Vec<String>>,
    /// Names that the file takes from its own modules, each with the first segment of its path.
    exports: BTreeMap<String, String>,
    /// Modules that exist only in tests.
    test_modules: Vec<Vec<String>>,
}

impl Source {
    fn read(text: &str, module: Vec<String>) -> Source {
        let mut reader = Reader { tokens: tokens(text).into_iter().peekable(), source: Source::default() };
        reader.items(&module);
        reader.source
    }
}

struct Reader {
    tokens: Peekable<IntoIter<String>>,
    source: Source,
}

impl Reader {
    /// Reads to the end of a block, or of the file.
    fn items(&mut self, module: &[String]) {
        let mut before = String::new();
        while let Some(token) = self.tokens.next() {
            match token.as_str() {
                "}" => return,
                "{" => self.items(module),
                "#" if self.is_next("[") && self.attribute() == "cfg(test)" => self.skip_item(module),
                "mod" => {
                    let name = self.tokens.next().unwrap_or_default();
                    if self.is_next("{") {
                        self.tokens.next();
                        self.items(&[module, &[name]].concat());
                    }
                }
                "use" if module.is_empty() || !self.is_next("crate") && !self.is_next("super") => self.export(),
                "crate" if self.is_next("::") => self.path(Vec::new()),
                "super" if before != "::" && self.is_next("::") => {
                    self.path(module[..module.len().saturating_sub(1)].to_vec());
                }
                _ => {}
            }
            before = token;
        }
    }

    fn is_next(&mut self, wanted: &str) -> bool {
        self.tokens.peek().is_some_and(|token| token == wanted)
    }

    /// The text between the brackets of an attribute.
    fn attribute(&mut self) -> String {
        let mut depth = 0;
        let mut text = String::new();
        for token in self.tokens.by_ref() {
            depth += usize::from(token == "[");
            if token == "]" {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
            text += &token;
        }
        text[1..].to_owned()
    }

    /// Skips an item for tests, including its further attributes.
    fn skip_item(&mut self, module: &[String]) {
        let mut depth = 0;
        let mut is_module = false;
        for token in self.tokens.by_ref() {
            match token.as_str() {
                "mod" => is_module = true,
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => {
                    depth -= 1;
                    if depth == 0 && token == "}" {
                        return;
                    }
                }
                ";" if depth == 0 => return,
                name if std::mem::take(&mut is_module) => {
                    self.source.test_modules.push([module, &[name.to_owned()]].concat());
                }
                _ => {}
            }
        }
    }

    /// Reads the rest of a path of which `begin` has been read: `::a::B`, or `::{a::B, c}`.
    fn path(&mut self, mut begin: Vec<String>) {
        while self.is_next("::") {
            self.tokens.next();
            match self.tokens.peek().map(String::as_str) {
                Some("super") => drop(begin.pop()),
                Some("{") => return self.names(&begin),
                Some(name) if name.starts_with(|c: char| c.is_alphanumeric() || c == '_') => {
                    begin.push(name.to_owned())
                }
                _ => break,
            }
            self.tokens.next();
        }
        self.source.uses.insert(begin);
    }

    /// `{a::B, c}` after `begin`.
    fn names(&mut self, begin: &[String]) {
        self.tokens.next();
        while let Some(token) = self.tokens.next() {
            match token.as_str() {
                "}" => return,
                "," | "*" => {}
                "self" => drop(self.source.uses.insert(begin.to_vec())),
                "as" => drop(self.tokens.next()),
                _ => self.path([begin, &[token]].concat()),
            }
        }
    }

    /// A `use` of own modules, or in the crate's root: every last name, or its alias, stands for the first segment.
    fn export(&mut self) {
        let words: Vec<String> = self.tokens.by_ref().take_while(|token| token != ";").collect();
        let is_begin = matches!(words.first().map(String::as_str), Some("crate" | "self"));
        let words = if is_begin { words.get(2..).unwrap_or_default() } else { &words };
        let Some(first) = words.first() else { return };
        for (place, word) in words.iter().enumerate() {
            let ends = words.get(place + 1).is_none_or(|next| next == "," || next == "}");
            if ends && !matches!(word.as_str(), "," | "}") {
                self.source.exports.insert(word.clone(), first.clone());
            }
        }
    }
}

/// The words and signs of a Rust file, without comments, strings, characters and lifetimes.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_length(rest)
        } else if let Some(length) = raw_text_length(rest) {
            length
        } else if first == '"' {
            text_length(rest)
        } else if first == '\'' {
            character_length(rest)
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            tokens.push(rest[..length].to_owned());
            length
        } else if rest.starts_with("::") {
            tokens.push("::".to_owned());
            2
        } else {
            if !first.is_whitespace() {
                tokens.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    tokens
}

fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut place) = (0, 0);
    loop {
        if text[place..].starts_with("/*") {
            (depth, place) = (depth + 1, place + 2);
        } else if text[place..].starts_with("*/") {
            (depth, place) = (depth - 1, place + 2);
        } else {
            let Some(next) = text[place..].chars().next() else { return place };
            place += next.len_utf8();
        }
        if depth == 0 {
            return place;
        }
    }
}

/// Length of `r"…"` or `br#"…"#`; `None` if the text only begins like one.
fn raw_text_length(text: &str) -> Option<usize> {
    let begin = text.find('"').filter(|&quote| quote <= 12)?;
    let hashes = text[..begin].strip_prefix("br").or_else(|| text[..begin].strip_prefix('r'))?;
    if hashes.bytes().any(|byte| byte != b'#') {
        return None;
    }
    let end = format!("\"{hashes}");
    Some(text[begin + 1..].find(&end).map_or(text.len(), |length| begin + 1 + length + end.len()))
}

fn text_length(text: &str) -> usize {
    let mut is_escaped = true;
    for (place, byte) in text.bytes().enumerate() {
        match byte {
            b'"' if !is_escaped => return place + 1,
            b'\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    text.len()
}

/// Length of a character, or of the quote of a lifetime.
fn character_length(text: &str) -> usize {
    let mut characters = text.char_indices().skip(1);
    match (characters.next(), characters.next()) {
        (Some((_, '\\')), Some((escaped, c))) => {
            let behind = escaped + c.len_utf8();
            text[behind..].find('\'').map_or(text.len(), |length| behind + length + 1)
        }
        (Some(_), Some((place, '\''))) => place + 1,
        _ => 1,
    }
}

/// The crates of ARCHITECTURE.md's first table, and the crates that each may use.
fn crate_table(architecture: &str) -> Vec<(String, BTreeSet<String>)> {
    let rows = architecture.lines().skip_while(|line| !line.starts_with("| crate |")).skip(2);
    let mut table: Vec<(String, BTreeSet<String>)> = Vec::new();
    for row in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let uses = match cells[3] {
            "those above" => table.iter().map(|(name, _)| name.clone()).collect(),
            "nothing" => BTreeSet::new(),
            names => names.split(',').map(|name| name.trim().trim_matches('`').to_owned()).collect(),
        };
        assert!(uses.iter().all(|used| table.iter().any(|(name, _)| name == used)), "only those above: {row}");
        table.push((cells[1].trim_matches('`').to_owned(), uses));
    }
    table
}

/// The workspace's crates that a manifest depends on, without dev-dependencies.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let lines = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    let names = lines.take_while(|line| !line.starts_with('[')).filter_map(|line| line.strip_prefix("gale-"));
    names.map(|line| line.split(['.', ' ', '=']).next().unwrap().to_owned()).collect()
}
