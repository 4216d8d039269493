//! `proxy_pass http://$arg_host`: the client chooses the upstream server (SSRF).

use bstr::ByteSlice;

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::{Variables, names_in};

pub const CHECK: Check = Check {
    name: "ssrf",
    severity: Severity::High,
    advice: "Choose the server by a map of allowed names, or make the location internal.",
    run,
};

const DIRECTIVES: &[&str] = &["proxy_pass", "grpc_pass", "fastcgi_pass", "uwsgi_pass", "scgi_pass", "memcached_pass"];

fn run(tree: &Tree<'_>, variables: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, node) in tree.nodes.iter().enumerate() {
        if !DIRECTIVES.iter().any(|name| node.is(name)) {
            continue;
        }
        let is_internal = |statement: &gale_config::Statement| statement.name.text == "internal";
        if tree.ancestors(number).any(|(_, block)| block.statement.body().iter().any(is_internal)) {
            continue;
        }
        let authority = authority(node.arg(0));
        let is_chosen = |name: &&str| match *name {
            // These begin with a slash, so the text before them is the whole authority.
            "uri" | "document_uri" | "request_uri" => false,
            name => variables.contents(name, number).dot,
        };
        if let Some(name) = names_in(authority).find(is_chosen) {
            let directive = bstr::BStr::new(node.name());
            found(number, format!("${name} in \"{directive}\" lets clients choose the upstream server"));
        }
    }
}

/// Returns the part of the URL between `://` and the path.
fn authority(url: &[u8]) -> &[u8] {
    let rest = url.split_once_str("://").map_or(url, |(_, rest)| rest);
    rest.split(|byte| matches!(byte, b'/' | b'?')).next().unwrap_or_default()
}
