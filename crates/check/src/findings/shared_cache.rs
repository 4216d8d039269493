//! `proxy_set_header Host $host` with a cache key without the host: all names of a server share cache entries.

use gale_config::Statement;

use super::Check;
use crate::report::Severity;
use crate::tree::{Node, Tree};
use crate::variables::{Variables, names_in};

pub const CHECK: Check = Check {
    name: "cache_shared_by_hosts",
    severity: Severity::High,
    advice: "Add $host to proxy_cache_key: the default key contains the proxied address, which is the same for all \
             hosts.",
    run,
};

fn run(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for (number, pass) in tree.named("proxy_pass") {
        let has_cache =
            in_effect(tree, number, "proxy_cache").first().is_some_and(|cache| first_arg(cache) != &b"off"[..]);
        let key = in_effect(tree, number, "proxy_cache_key");
        // An address with a variable selects the server per request, and the default key contains the address.
        let has_host = key.first().is_some_and(|key| tells_hosts(first_arg(key))) || pass.arg(0).contains(&b'$');
        if !has_cache || has_host || !tells_application(&in_effect(tree, number, "proxy_set_header")) {
            continue;
        }
        if let Some((_, server)) = tree.ancestors(number).find(|(_, block)| block.is("server"))
            && has_several_names(&server)
        {
            found(number, "the application receives the host, but all hosts share the cached responses".to_owned());
        }
    }
}

/// Returns the statements with this name in the innermost block that has any: those in effect for the given statement.
fn in_effect<'s>(tree: &Tree<'s>, number: usize, name: &str) -> Vec<&'s Statement> {
    let of_block = |(_, block): (usize, Node<'s>)| {
        let body = block.statement.body().iter();
        body.filter(|statement| statement.name.text == name).collect::<Vec<_>>()
    };
    tree.ancestors(number).map(of_block).find(|found| !found.is_empty()).unwrap_or_default()
}

fn first_arg(statement: &Statement) -> &[u8] {
    statement.args.first().map_or(b"", |word| &word.text)
}

fn tells_hosts(text: &[u8]) -> bool {
    names_in(text).any(|name| matches!(name, "host" | "http_host"))
}

/// Returns `true` if the application receives the client's host as its own.
fn tells_application(fields: &[&Statement]) -> bool {
    fields.iter().any(|field| {
        first_arg(field).eq_ignore_ascii_case(b"host") && field.args.get(1).is_some_and(|word| tells_hosts(&word.text))
    })
}

/// Returns `true` if the server has more than one name, or a name that matches several hosts.
fn has_several_names(server: &Node<'_>) -> bool {
    let names = server.statement.body().iter().filter(|statement| statement.name.text == "server_name");
    let names: Vec<_> = names.flat_map(|statement| &statement.args).map(|word| &word.text).collect();
    let stands_for_many = |name: &[u8]| name.contains(&b'*') || name.starts_with(b".") || name.starts_with(b"~");
    names.len() > 1 || names.iter().any(|name| stands_for_many(name))
}
