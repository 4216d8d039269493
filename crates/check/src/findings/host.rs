//! `proxy_set_header Host $http_host`: the application receives a host name written by the client.

use bstr::ByteSlice;

use super::Check;
use crate::report::Severity;
use crate::tree::Tree;
use crate::variables::{Variables, names_in};

pub const CHECK: Check = Check {
    name: "host_spoofing",
    severity: Severity::Medium,
    advice: "Use $host, and restrict it with a `listen … default_server` that has `return 444`.",
    run,
};

fn run(tree: &Tree<'_>, _: &Variables<'_, '_>, found: &mut dyn FnMut(usize, String)) {
    for directive in ["proxy_set_header", "grpc_set_header", "fastcgi_param", "uwsgi_param", "scgi_param"] {
        for (number, node) in tree.named(directive) {
            let is_host = [&b"host"[..], b"http_host"].iter().any(|name| node.arg(0).eq_ignore_ascii_case(name));
            // CGI requires a parameter `HTTP_HOST` with exactly this value.
            let is_host = is_host && !(directive.ends_with("_param") && node.arg(1).trim() == b"$http_host");
            let of_client = |name: &&str| *name == "http_host" || name.starts_with("arg_");
            if let Some(name) = names_in(node.arg(1)).find(of_client).filter(|_| is_host) {
                found(number, format!("the application receives ${name}, written by the client, as its host name"));
            }
        }
    }
}
