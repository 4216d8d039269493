//! The layers of ARCHITECTURE.md: no cycle between crates, and none between the folders of a crate.
//!
//! A folder, or a file, directly under a crate's `src` is one node of the crate's graph. Every path that begins with
//! `crate::` or `super::` and leaves the node is an edge; a name that `lib.rs` re-exports counts for its origin. Code
//! under `#[cfg(test)]` does not count: a test may use higher layers.

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
    Allowed {
        in_crate: "log",
        from: &["about"],
        to: &["json"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "log",
        from: &["syslog"],
        to: &["writer"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "log",
        from: &["syslog_stream"],
        to: &["syslog"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "spool",
        from: &["store"],
        to: &["state"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["commands", "verify"],
        to: &["settings"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["library"],
        to: &["stream"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["verify_server"],
        to: &["client"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["managed"],
        to: &["staple"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["staple"],
        to: &["server"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "tls",
        from: &["ocsp"],
        to: &["stream"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["warm"],
        to: &["pool"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["balance"],
        to: &["peer", "peers", "selection"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["health"],
        to: &["peer", "peers"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["outliers"],
        to: &["peer"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["plan"],
        to: &["servers", "state"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "upstream",
        from: &["state_file"],
        to: &["registry", "servers"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "worker",
        from: &["limit"],
        to: &["state"],
        because: "two files of one folder of `engine`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "files",
        from: &["file"],
        to: &["file_system", "page_cache", "shared_reads"],
        because: "files of one folder of `runtime`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "files",
        from: &["open", "page_cache", "shared_reads", "simulated"],
        to: &["file_system"],
        because: "files of one folder of `runtime`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "files",
        from: &["mounts"],
        to: &["open"],
        because: "files of one folder of `runtime`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "files",
        from: &["page_cache"],
        to: &["shared_reads"],
        because: "files of one folder of `runtime`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "files",
        from: &["growing"],
        to: &["writer"],
        because: "files of one folder of `runtime`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-cache",
        from: &["eviction"],
        to: &["index"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-cache",
        from: &["key", "sums"],
        to: &["format"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-cache",
        from: &["policy"],
        to: &["purges"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-cache",
        from: &["settings"],
        to: &["zone"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-upstream",
        from: &["answering", "body", "caching", "client", "exclusive", "http2", "response", "store"],
        to: &["attempt"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-upstream",
        from: &["exclusive", "http2"],
        to: &["answering"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-upstream",
        from: &["answering", "caching"],
        to: &["response"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
    Allowed {
        in_crate: "http-upstream",
        from: &["body", "settings"],
        to: &["store"],
        because: "files of one folder of `http`, which became this crate, know each other",
    },
];

/// Every module of `from` may use every one of `to`.
struct Allowed {
    in_crate: &'static str,
    from: &'static [&'static str],
    to: &'static [&'static str],
    because: &'static str,
}

/// The top-level modules of a crate, the modules that each uses, and the files of each use.
type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[test]
fn folders_of_a_crate_are_in_no_circle() {
    let mut complaints = Vec::new();
    for name in crates() {
        let mut graph = graph_of(&files_under(&workspace().join("crates").join(&name).join("src")));
        for allowed in ALLOWED.iter().filter(|allowed| allowed.in_crate == name) {
            assert!(!allowed.because.is_empty());
            for (from, to) in allowed.from.iter().flat_map(|from| allowed.to.iter().map(move |to| (from, to))) {
                if graph.get_mut(*from).and_then(|uses| uses.remove(*to)).is_none() {
                    complaints.push(format!("crates/{name}: `{from}` does not use `{to}`, so it need not be allowed"));
                }
            }
        }
        complaints.extend(circle(&graph).map(|circle| format!("crates/{name}: {}", describe(&circle, &graph))));
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
        let graph = graph_of(&files.collect::<Vec<_>>());
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

/// The uses between the top-level modules of a crate.
fn graph_of(files: &[(String, String)]) -> Graph {
    let sources: Vec<(&str, Vec<String>, Source)> = files
        .iter()
        .map(|(path, text)| {
            let module = module_of(path);
            (path.as_str(), module.clone(), Source::read(text, module))
        })
        .collect();
    let test_modules: Vec<&Vec<String>> = sources.iter().flat_map(|(_, _, source)| &source.test_modules).collect();
    let is_test = |module: &[String]| test_modules.iter().any(|test| module.starts_with(test));
    let top_levels: BTreeSet<&String> = sources.iter().filter_map(|(_, module, _)| module.first()).collect();
    let exports: BTreeMap<&String, &String> =
        sources.iter().filter(|(_, module, _)| module.is_empty()).flat_map(|(_, _, source)| &source.exports).collect();
    let mut graph = Graph::new();
    for (path, module, source) in sources.iter().filter(|(_, module, _)| !is_test(module)) {
        let Some(top_level) = module.first() else { continue };
        let uses = graph.entry(top_level.clone()).or_default();
        for name in &source.uses {
            let origin = if top_levels.contains(name) { Some(name) } else { exports.get(name).copied() };
            if let Some(origin) = origin.filter(|origin| *origin != top_level) {
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
    /// First segments of paths that begin at the crate.
    uses: BTreeSet<String>,
    /// Names that the file exports, each with the first segment of its path.
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
                "use" if module.is_empty() => self.export(),
                "crate" if self.is_next("::") => self.path(&[]),
                "super" if before != "::" && self.is_next("::") => self.path(&module[..module.len().saturating_sub(1)]),
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

    /// Reads the rest of a path of which `module` has been read.
    fn path(&mut self, module: &[String]) {
        self.tokens.next();
        let Some(next) = self.tokens.peek() else { return };
        match (next.as_str(), module.split_last()) {
            ("super", Some((_, outer))) => {
                self.tokens.next();
                self.path(outer);
            }
            ("{", None) => self.names(),
            (name, None) => drop(self.source.uses.insert(name.to_owned())),
            // The path stays inside its top-level module.
            _ => {}
        }
    }

    /// `{a::B, c}` after the crate: the first segments.
    fn names(&mut self) {
        let mut depth = 0;
        let mut is_first = false;
        for token in self.tokens.by_ref() {
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ if is_first => drop(self.source.uses.insert(token.clone())),
                _ => {}
            }
            if depth == 0 {
                return;
            }
            is_first = depth == 1 && matches!(token.as_str(), "{" | ",");
        }
    }

    /// A `use` in the crate's root: every last name, or its alias, stands for the first segment.
    fn export(&mut self) {
        let words: Vec<String> = self.tokens.by_ref().take_while(|token| token != ";").collect();
        let words = words.strip_prefix(&["crate".to_owned(), "::".to_owned()]).unwrap_or(&words);
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
