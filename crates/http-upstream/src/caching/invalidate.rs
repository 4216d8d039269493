//! Invalidates stored responses after an unsafe request: that of its own URI, and those of URIs on the same site that
//! the response names. (RFC 9111 §4.4)
//!
//! `Location` and `Content-Location` name URIs as clients see them or, from servers that know nothing of their proxy,
//! as the server sees them. A path may be either, so both are invalidated; a URL with the server's own host is one of
//! the server's.
//!
//! ```text
//!   proxy_pass http://app/inner/ in location /outer/; a POST to /outer/a is answered with Location: …
//!
//!   Location            key ends with $request_uri    with $proxy_uri
//!   http://site/outer/b       /outer/b                      /inner/b
//!   http://app/inner/b        /outer/b                      /inner/b
//! ```

use gale_http::request::Request;
use gale_http::request::files::pool_of;
use gale_http::request::response::FieldList;
use gale_http_cache::key::id_of;
use gale_http_cache::memory;
use gale_http_cache::search::SearchKey;
use gale_http_cache::services::write_soon;
use gale_protocol::request::{KnownHeader, Scheme};
use gale_protocol::response::ResponseField;

use super::search;
use crate::caching_state::Caching;
use crate::passing::Passing;
use crate::rewriter::ServerNames;

/// Invalidates after a success. If the key ends with the target of the client's or the server's request, the keys for
/// the URIs that the response names are made by replacing that target.
pub(super) fn invalidate(request: &Request, passing: &Passing<'_>, caching: &Caching, fields: &FieldList) {
    let pool = pool_of(request);
    let purge = |key: &[u8]| {
        let id = id_of(key);
        if caching.zone.purge_key(&id, false, Some(&pool)).is_noted {
            write_soon(&caching.zone);
        }
        memory::forget(caching.zone.identity(), &id);
    };
    let purge_search = |search: &SearchKey| {
        if search::purge(&caching.zone, search, false, &pool).is_noted {
            write_soon(&caching.zone);
        }
    };
    purge(&caching.key);
    if let Some(search) = &caching.search {
        purge_search(search);
    }
    let names = passing.rewriter.server_names(request);
    let asked = Asked::of(request, passing, &names);
    let Some((prefix, side)) = asked.side_of(&caching.key) else { return };
    let named = fields.iter().filter(|field| {
        field.name.known() == Some(ResponseField::Location) || field.name.eq_ignore_ascii_case(b"Content-Location")
    });
    for field in named {
        for target in asked.targets(request, side, &field.value) {
            purge(&[prefix, &target].concat());
            if let Some(search) = caching.search.as_ref().and_then(|_| SearchKey::of_target(prefix, &target)) {
                purge_search(&search);
            }
        }
    }
}

/// True if `Content-Location` is the request's own URI, so that the response also answers a GET of that URI. (RFC 9110
/// §8.7)
pub(super) fn stands_for_get(request: &Request, passing: &Passing<'_>, caching: &Caching, fields: &FieldList) -> bool {
    let names = passing.rewriter.server_names(request);
    let asked = Asked::of(request, passing, &names);
    let Some((prefix, side)) = asked.side_of(&caching.key) else { return false };
    let mut named = fields.iter().filter(|field| field.name.eq_ignore_ascii_case(b"Content-Location"));
    let named = named.next().filter(|_| named.next().is_none());
    named.is_some_and(|field| {
        let targets = asked.targets(request, side, &field.value);
        targets.iter().any(|target| [prefix, target].concat() == *caching.key)
    })
}

/// The side whose targets a key contains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// The targets of the request, of the client and to the server.
struct Asked<'r> {
    client: &'r [u8],
    server: &'r [u8],
    /// Scheme and host of the server.
    server_origin: Option<(Scheme, &'r [u8])>,
    /// A prefix of the client's targets, and its replacement in the server's.
    replaced: Option<(&'r [u8], &'r [u8])>,
}

impl<'r> Asked<'r> {
    fn of(request: &'r Request, passing: &'r Passing<'_>, names: &'r Option<ServerNames>) -> Asked<'r> {
        let (client, server) = (request.target_in_origin_form(), &passing.uri[..]);
        let replaced = names.as_ref().and_then(|names| names.replaced.as_ref());
        Asked {
            client,
            server,
            server_origin: names.as_ref().map(|names| (names.scheme, &*names.host)),
            replaced: replaced
                .map(|replaced| (&*replaced.client, &*replaced.server))
                .or_else(|| server.strip_suffix(client).map(|added| (&b""[..], added))),
        }
    }

    /// The part of a key before the target, and the side of the target.
    fn side_of<'k>(&self, key: &'k [u8]) -> Option<(&'k [u8], Side)> {
        let mut sides = [(self.client, Side::Client), (self.server, Side::Server)];
        // A key that ends with both contains the longer one.
        if self.server.len() > self.client.len() {
            sides.swap(0, 1);
        }
        let find = |(target, side): (&[u8], Side)| {
            let prefix = key.strip_suffix(target).filter(|_| target.starts_with(b"/"))?;
            Some((prefix, side))
        };
        sides.into_iter().find_map(find)
    }

    /// The targets of this side that a URI may name.
    fn targets(&self, request: &Request, side: Side, value: &[u8]) -> Vec<Vec<u8>> {
        // The fragment is for the client alone.
        let value = value.split(|&byte| byte == b'#').next().unwrap_or_default();
        let is_path = value.starts_with(b"/") && !value.starts_with(b"//");
        let of_client = || {
            let host = request.header(KnownHeader::Host)?;
            target_at(value, request.exchange().scheme(), host)
        };
        let of_server = || {
            let (scheme, host) = self.server_origin?;
            target_at(value, scheme, host)
        };
        let client = if is_path { Some(value) } else { of_client() };
        let server = client.or_else(of_server);
        let swap = |target: &[u8], from: &[u8], to: &[u8]| Some([to, target.strip_prefix(from)?].concat());
        let [as_client, as_server] = match side {
            Side::Client => [
                client.map(<[u8]>::to_vec),
                server.zip(self.replaced).and_then(|(target, (client, server))| swap(target, server, client)),
            ],
            Side::Server => [
                client.zip(self.replaced).and_then(|(target, (client, server))| swap(target, client, server)),
                server.map(<[u8]>::to_vec),
            ],
        };
        let as_server = as_server.filter(|target| as_client.as_ref() != Some(target));
        as_client.into_iter().chain(as_server).collect()
    }
}

/// The path, with arguments, of a URL of this origin. (RFC 6454 §5)
fn target_at<'v>(value: &'v [u8], scheme: Scheme, host: &[u8]) -> Option<&'v [u8]> {
    let name = scheme.name().as_bytes();
    let is_scheme = value.get(..name.len())?.eq_ignore_ascii_case(name);
    let rest = value[name.len()..].strip_prefix(b"://").filter(|_| is_scheme)?;
    let (authority, target) = rest.split_at(memchr::memchr2(b'/', b'?', rest).unwrap_or(rest.len()));
    let is_host = without_usual_port(authority, scheme).eq_ignore_ascii_case(without_usual_port(host, scheme));
    let target = if target.is_empty() { b"/" } else { target };
    (is_host && target.starts_with(b"/")).then_some(target)
}

fn without_usual_port(host: &[u8], scheme: Scheme) -> &[u8] {
    host.strip_suffix(format!(":{}", scheme.default_port()).as_bytes()).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_another_origin_have_no_target() {
        let target = |value: &str| target_at(value.as_bytes(), Scheme::Http, b"a:80").map(|found| found.to_vec());
        for value in ["http://a/b?c", "HTTP://A/b?c", "http://a:80/b?c"] {
            assert_eq!(target(value).as_deref(), Some(&b"/b?c"[..]), "{value}");
        }
        assert_eq!(target("http://a").as_deref(), Some(&b"/"[..]));
        for value in ["", "http", "https://a/b", "http://b/b", "http://a:81/b", "http://a.b/b", "http://a?b", "//a/b"] {
            assert_eq!(target(value), None, "{value}");
        }
    }
}
