//! Gale accepts the configurations in the documents.

use std::fs;
use std::path::Path;

use crate::support::authority::Authority;
use crate::support::*;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Surroundings of an excerpt of a configuration.
const AROUND: &[[&str; 2]] = &[
    ["", ""],
    ["events {}", ""],
    ["events {} http {\n", "}"],
    ["events {} http {\n server {", "} }"],
    ["events {} http {\n server { location / {", "} } }"],
    ["events {} stream {\n", "}"],
    ["events {} stream {\n server { listen 127.0.0.1:1;", "} }"],
];

/// Groups that the documents name and do not define.
const GROUPS: &[&str] = &["app", "app.internal", "origin", "greeter", "db", "redis_servers", "backend"];
const ELSEWHERE: &str = "proxy_cache_path cache keys_zone=pages:1m;
    map $request_method $purge { default 0; }
    otel_exporter { endpoint localhost:4317; }";

#[test]
fn configurations_in_the_documents_are_accepted() {
    let directory = Directory::new();
    for name in ["fastcgi_params", "fastcgi.conf", "uwsgi_params", "scgi_params"] {
        fs::copy(Path::new(ROOT).join("packaging").join(name), directory.path().join(name)).expect("a file");
    }
    let own = Authority::new("documents").ecdsa(&["example.com"]);
    fs::write(directory.path().join("own.pem"), own.certificate + &own.key).expect("ours");
    for name in ["cache/gale", "lib/gale", "log/gale", "www"] {
        fs::create_dir_all(directory.path().join(name)).expect("ours");
    }
    let mut count = 0;
    for document in ["caching", "grpc", "http2", "proxying", "status", "stream", "tracing"] {
        let text = fs::read_to_string(format!("{ROOT}/docs/{document}.md")).expect("a document");
        for piece in text.split("```nginx\n").skip(1) {
            let piece = piece.split("```").next().expect("a piece");
            let errors: Vec<String> = AROUND.iter().map_while(|around| refusal(&directory, piece, *around)).collect();
            assert!(errors.len() < AROUND.len(), "{document}.md: {piece}\n{}", errors.join("\n"));
            count += 1;
        }
    }
    assert!(count > 20, "{count}");
}

/// Error for an excerpt in these surroundings, if any.
fn refusal(directory: &Directory, piece: &str, [before, behind]: [&str; 2]) -> Option<String> {
    let block = |name: &str| (format!("{name} {{\n"), format!("{name} {{\n{}", stubs(piece, name)));
    let mut configuration = format!("{before}\n{piece}\n{behind}");
    for (begin, with_stubs) in ["http", "stream"].map(block) {
        configuration = configuration.replacen(&begin, &with_stubs, 1);
    }
    let file = directory.path().join("gale.conf");
    fs::write(&file, with_own_files(&configuration, directory.path())).expect("ours");
    let output =
        binary(false).arg("-t").arg("-p").arg(directory.path()).arg("-c").arg(&file).output().expect("it runs");
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Definitions for names that an excerpt uses and does not define.
fn stubs(piece: &str, block: &str) -> String {
    let has = |word: &str| piece.lines().any(|line| line.trim_start().starts_with(word));
    let groups = GROUPS.iter().map(|name| format!("upstream {name} {{"));
    let mut stubs: String =
        groups.filter(|begin| !has(begin)).map(|begin| format!("{begin} server 127.0.0.1:1; }}\n")).collect();
    if block == "http" {
        stubs.extend(ELSEWHERE.lines().filter(|line| !has(line.split_whitespace().next().expect("a word"))));
    }
    stubs
}

/// Replaces the machine's files by files of this directory.
fn with_own_files(configuration: &str, directory: &Path) -> String {
    let own = |word: &str| {
        let path = word.trim_end_matches(|character: char| character == ';' || character.is_whitespace());
        let is_pem = path.starts_with('/') && [".crt", ".key", ".pem"].iter().any(|end| path.ends_with(end));
        if is_pem { format!("{}{}", directory.join("own.pem").display(), &word[path.len()..]) } else { word.to_owned() }
    };
    let words = configuration.split_inclusive(|character: char| character == ';' || character.is_whitespace());
    words.map(own).collect::<String>().replace("/var/", &format!("{}/", directory.display()))
}
