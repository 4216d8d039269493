//! Selection of a server by host name; also host names with wildcards for other users (`map`).
//!
//! The order is nginx's: the exact name, the longest wildcard that begins with an asterisk, the longest that ends with
//! one, the first regular expression that matches, and finally the default server of the address.
//! (<https://nginx.org/en/docs/http/server_names.html>)

use hashbrown::HashMap;

use crate::configuration::ServerId;
use crate::variables::regex::{Match, Regex};

/// A parsed argument of `server_name`.
#[derive(Clone, Debug)]
pub enum ServerName {
    /// `example.com`, or the empty name for requests without a host.
    Exact(Box<[u8]>),
    /// `*.example.com`: the part after the asterisk and its dot; with `bare` (written `.example.com`) also the name
    /// without a further label.
    Head {
        /// `example.com`
        suffix: Box<[u8]>,
        /// Written with a leading dot: `example.com` itself matches.
        bare: bool,
    },
    /// `www.example.*`: the part before the dot and the asterisk.
    Tail(Box<[u8]>),
    /// `~expression`
    Regex(Regex),
}

impl ServerName {
    /// Parses one argument of `server_name`; the error is nginx's message.
    pub fn parse(text: &[u8]) -> Result<ServerName, String> {
        let invalid = || format!("invalid server name or wildcard \"{}\"", bstr::BStr::new(text));
        if let Some(expression) = text.strip_prefix(b"~") {
            if expression.is_empty() {
                return Err(format!("empty regex in server name \"{}\"", bstr::BStr::new(text)));
            }
            // nginx compiles expressions with a capital letter caselessly, because hosts are compared in lower case.
            let caseless = expression.iter().any(u8::is_ascii_uppercase);
            return Regex::compile(expression, caseless).map(ServerName::Regex);
        }
        let name = text.to_ascii_lowercase();
        let is_plain = |part: &[u8]| !part.contains(&b'*') && !part.contains(&0) && !has_empty_label(part);
        if let Some(suffix) = name.strip_prefix(b"*.") {
            let usable = !suffix.is_empty() && is_plain(suffix);
            return usable.then(|| ServerName::Head { suffix: suffix.into(), bare: false }).ok_or_else(invalid);
        }
        if let Some(prefix) = name.strip_suffix(b".*") {
            let usable = !prefix.is_empty() && is_plain(prefix);
            return usable.then(|| ServerName::Tail(prefix.into())).ok_or_else(invalid);
        }
        if let Some(suffix) = name.strip_prefix(b".") {
            let usable = !suffix.is_empty() && is_plain(suffix);
            return usable.then(|| ServerName::Head { suffix: suffix.into(), bare: true }).ok_or_else(invalid);
        }
        if name.is_empty() || is_plain(&name) {
            return Ok(ServerName::Exact(name.into()));
        }
        Err(invalid())
    }
}

fn has_empty_label(name: &[u8]) -> bool {
    name.starts_with(b".") || name.windows(2).any(|pair| pair == b"..")
}

/// Names of all servers of one address, or of other items.
#[derive(Debug)]
pub struct ServerNames<T = ServerId> {
    exact: HashMap<Box<[u8]>, T>,
    heads: HashMap<Box<[u8]>, T>,
    tails: HashMap<Box<[u8]>, T>,
    /// Lengths of the longest entries of `heads` and `tails`. A client may send a host of any length with any number of
    /// dots; longer parts are not even hashed.
    head_max: usize,
    tail_max: usize,
    regexes: Vec<(Regex, T)>,
}

impl<T> Default for ServerNames<T> {
    fn default() -> ServerNames<T> {
        let (exact, heads, tails) = (HashMap::new(), HashMap::new(), HashMap::new());
        ServerNames { exact, heads, tails, head_max: 0, tail_max: 0, regexes: Vec::new() }
    }
}

/// A name was given twice for the same address: the later one is ignored with a warning.
#[derive(Debug)]
pub struct Conflict;

impl<T: Copy + PartialEq> ServerNames<T> {
    /// Adds a name of `server`.
    pub fn insert(&mut self, name: ServerName, server: T) -> Result<(), Conflict> {
        let put = |table: &mut HashMap<Box<[u8]>, T>, key: Box<[u8]>| {
            let holder = *table.entry(key).or_insert(server);
            if holder == server { Ok(()) } else { Err(Conflict) }
        };
        match name {
            ServerName::Exact(name) => put(&mut self.exact, name),
            ServerName::Head { suffix, bare } => {
                if bare {
                    put(&mut self.exact, suffix.clone())?;
                }
                self.head_max = self.head_max.max(suffix.len());
                put(&mut self.heads, suffix)
            }
            ServerName::Tail(prefix) => {
                self.tail_max = self.tail_max.max(prefix.len());
                put(&mut self.tails, prefix)
            }
            ServerName::Regex(regex) => {
                self.regexes.push((regex, server));
                Ok(())
            }
        }
    }

    /// `true` if all requests go to the default server.
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.heads.is_empty() && self.tails.is_empty() && self.regexes.is_empty()
    }

    /// The server for `host` (in lower case, without port and trailing dot). The error is PCRE2's message if an
    /// expression could not be run.
    pub fn find(&self, host: &[u8]) -> Result<Option<(T, Option<Match<'_>>)>, String> {
        match self.find_name(host) {
            Some(server) => Ok(Some((server, None))),
            None => Ok(self.find_regex(host)?.map(|(server, matched)| (server, Some(matched)))),
        }
    }

    /// The server found without regular expressions.
    pub fn find_name(&self, host: &[u8]) -> Option<T> {
        self.exact.get(host).copied().or_else(|| self.find_wildcard(host))
    }

    /// The first regular expression that matches. None matches an empty text.
    pub fn find_regex(&self, text: &[u8]) -> Result<Option<(T, Match<'_>)>, String> {
        if text.is_empty() {
            return Ok(None);
        }
        for (regex, server) in &self.regexes {
            if let Some(matched) = regex.find(text)? {
                return Ok(Some((*server, matched)));
            }
        }
        Ok(None)
    }

    fn find_wildcard(&self, host: &[u8]) -> Option<T> {
        if !self.heads.is_empty() {
            // The first dot leaves the longest suffix.
            let start = host.len().saturating_sub(self.head_max + 1);
            for dot in memchr::memchr_iter(b'.', &host[start..]).map(|dot| start + dot).filter(|&dot| dot > 0) {
                if let Some(&server) = self.heads.get(&host[dot + 1..]) {
                    return Some(server);
                }
            }
        }
        if !self.tails.is_empty() {
            let end = host.len().min(self.tail_max + 1);
            for dot in memchr::memchr_iter(b'.', &host[..end]).rev().filter(|&dot| dot + 1 < host.len()) {
                if let Some(&server) = self.tails.get(&host[..dot]) {
                    return Some(server);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(rows: &[(&str, u32)]) -> ServerNames {
        let mut names = ServerNames::default();
        for (name, server) in rows {
            let parsed = ServerName::parse(name.as_bytes()).unwrap();
            names.insert(parsed, ServerId(*server)).unwrap();
        }
        names
    }

    #[track_caller]
    fn finds(names: &ServerNames, host: &str, server: Option<u32>) {
        let found = names.find(host.as_bytes()).unwrap();
        assert_eq!(found.map(|(server, _)| server.0), server, "{host}");
    }

    #[test]
    fn exact_before_head_before_tail_before_expression() {
        let names = names(&[
            ("www.example.com", 1),
            ("*.example.com", 2),
            ("*.com", 3),
            ("www.example.*", 4),
            ("www.*", 5),
            ("~^(?<user>.+)\\.net$", 6),
            ("~^x", 7),
        ]);
        finds(&names, "www.example.com", Some(1));
        finds(&names, "a.b.example.com", Some(2));
        finds(&names, "example.com", Some(3));
        finds(&names, "www.example.org", Some(4));
        finds(&names, "www.other.net", Some(5));
        finds(&names, "me.net", Some(6));
        finds(&names, "x.net", Some(6));
        finds(&names, "xyz", Some(7));
        finds(&names, "", None);
        finds(&names, ".com", None);
    }

    #[test]
    fn a_leading_dot_takes_in_the_bare_name() {
        let names = names(&[(".example.com", 1), ("", 2)]);
        finds(&names, "example.com", Some(1));
        finds(&names, "a.example.com", Some(1));
        finds(&names, "aexample.com", None);
        finds(&names, "", Some(2));
    }

    #[test]
    fn a_host_of_dots_is_not_hashed_over_and_over() {
        let names = names(&[("*.example.com", 1), ("www.*", 2), (".b.c", 3)]);
        finds(&names, &format!("{}.example.com", ".a".repeat(1000)), Some(1));
        finds(&names, &format!("www{}", ".a".repeat(1000)), Some(2));
        finds(&names, "a.b.c", Some(3));
        finds(&names, "www.", None);
        // Hashing each of its suffixes and prefixes would take an hour.
        finds(&names, &".a".repeat(1 << 20), None);
    }

    #[test]
    fn wrong_names_are_refused_in_nginx_s_words() {
        for name in ["*", "a*.com", "*.", "*..com", "a.*.com", ".a..b", "www.*.*", "a..b"] {
            let error = ServerName::parse(name.as_bytes()).unwrap_err();
            assert_eq!(error, format!("invalid server name or wildcard \"{name}\""));
        }
        assert_eq!(ServerName::parse(b"~").unwrap_err(), "empty regex in server name \"~\"");
        assert!(ServerName::parse(b"~(").is_err());
    }

    #[test]
    fn the_same_name_in_two_servers_is_a_conflict() {
        let mut names = names(&[("a", 1), ("a", 1)]);
        assert!(names.insert(ServerName::parse(b"A").unwrap(), ServerId(2)).is_err());
        finds(&names, "a", Some(1));
    }
}
