//! A checkout of nginx's test suite: its files, their areas, and selection by name.
//!
//! It reads directory names only and opens no test file. Invariant: every file belongs to exactly one area.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// Areas by prefix of the file name; the longest prefix applies. Without a match, the area is the first word of the
/// name (`mirror_proxy.t`: mirror). The names are those in nginx's documentation.
const AREAS: &[(&str, &str)] = &[
    ("access.", "access"),
    ("access_log", "log"),
    ("auth_basic", "auth_basic"),
    ("auth_delay", "http core"),
    ("auth_request", "auth_request"),
    ("binary_upgrade", "core"),
    ("body", "http core"),
    ("config_dump", "core"),
    ("debug_connection", "core"),
    ("empty_gif", "empty_gif"),
    ("error_log", "core"),
    ("gunzip", "gzip"),
    ("h3", "h3"),
    ("http_", "http core"),
    ("ignore_invalid_headers", "http core"),
    ("image_filter", "image_filter"),
    ("limit_conn", "limit_conn"),
    ("limit_rate", "http core"),
    ("limit_req", "limit_req"),
    ("merge_slashes", "http core"),
    ("msie_refresh", "http core"),
    ("not_modified", "http core"),
    ("post_action", "http core"),
    ("proxy_cache", "proxy cache"),
    ("proxy_h2", "proxy h2"),
    ("proxy_protocol", "http core"),
    ("proxy_ssl", "proxy ssl"),
    ("quic", "h3"),
    ("random_index", "random_index"),
    ("range", "http core"),
    ("request_id", "http core"),
    ("secure_link", "secure_link"),
    ("server_tokens", "http core"),
    ("split_clients", "split_clients"),
    ("stream_ssl", "stream ssl"),
    ("stream_upstream", "stream upstream"),
    ("stub_status", "stub_status"),
    ("sub_filter", "sub_filter"),
    ("subrequest", "http core"),
    ("syslog", "core"),
    ("trailers", "headers"),
    ("worker_shutdown_timeout", "core"),
];

pub fn area(file: &str) -> &str {
    let fitting = AREAS.iter().filter(|(beginning, _)| file.starts_with(beginning));
    match fitting.max_by_key(|(beginning, _)| beginning.len()) {
        Some((_, area)) => area,
        None => file.split(['_', '.']).next().unwrap_or(file),
    }
}

#[derive(Debug)]
pub struct Suite {
    pub path: PathBuf,
    /// Sorted names of the test files.
    pub files: Vec<String>,
}

impl Suite {
    /// Lists the checkout at `path`. Fails if it is not a checkout.
    pub fn open(path: &Path) -> Result<Suite, String> {
        let problem = |error: std::io::Error| format!("{}: {error}", path.display());
        let path = path.canonicalize().map_err(problem)?;
        if !path.join("lib/Test/Nginx.pm").is_file() {
            return Err(format!(
                "{} is no checkout of nginx's test suite: it has no lib/Test/Nginx.pm",
                path.display()
            ));
        }
        let mut files = Vec::new();
        for entry in path.read_dir().map_err(problem)? {
            let name = entry.map_err(problem)?.file_name();
            files.extend(name.to_str().filter(|name| name.ends_with(".t")).map(str::to_owned));
        }
        files.sort();
        Ok(Suite { path, files })
    }

    /// Returns the commit of the checkout, or `None` if git does not report it.
    pub fn commit(&self) -> Option<String> {
        let git = Command::new("git").arg("-C").arg(&self.path).args(["rev-parse", "HEAD"]).output().ok()?;
        let commit = String::from_utf8(git.stdout).ok()?.trim().to_owned();
        (git.status.success() && !commit.is_empty()).then_some(commit)
    }

    /// Returns the files selected by `wanted`: areas, file names with or without `.t`, or globs. Without any, returns
    /// all files. A word that matches nothing is an error.
    pub fn select(&self, wanted: &[String]) -> Result<Vec<String>, String> {
        let patterns: Vec<Pattern> = wanted.iter().map(|word| self.pattern(word)).collect();
        for pattern in &patterns {
            if !self.files.iter().any(|file| pattern.matches(file, area(file))) {
                return Err(format!("\"{}\" is no area, file or glob of the suite", pattern.text()));
            }
        }
        let asked = |file: &&String| patterns.is_empty() || patterns.iter().any(|p| p.matches(file, area(file)));
        Ok(self.files.iter().filter(asked).cloned().collect())
    }

    /// Returns the pattern for a word. An area takes precedence over a file: `rewrite` is the area, `rewrite.t` the
    /// file.
    fn pattern(&self, word: &str) -> Pattern {
        let is_area = self.files.iter().any(|file| area(file) == word);
        let with_ending = format!("{word}.t");
        Pattern(if !is_area && self.files.contains(&with_ending) { with_ending } else { word.to_owned() })
    }
}

/// An area, or a file name in which `*` matches any text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Pattern(String);

impl Pattern {
    pub fn text(&self) -> &str {
        &self.0
    }

    pub fn matches(&self, file: &str, area: &str) -> bool {
        self.0 == area || glob_matches(self.0.as_bytes(), file.as_bytes())
    }

    /// Returns true if it matches anything in today's suite: a glob, a file name, or an area of the table.
    #[cfg(test)]
    pub fn is_known(&self) -> bool {
        const FIRST_WORDS: &[&str] = &[
            "addition",
            "autoindex",
            "charset",
            "dav",
            "fastcgi",
            "geo",
            "geoip",
            "grpc",
            "gzip",
            "h2",
            "headers",
            "index",
            "mail",
            "map",
            "memcached",
            "mirror",
            "mp4",
            "perl",
            "proxy",
            "realip",
            "referer",
            "rewrite",
            "scgi",
            "slice",
            "ssi",
            "ssl",
            "stream",
            "tunnel",
            "upstream",
            "userid",
            "uwsgi",
            "xslt",
        ];
        self.0.ends_with(".t") || AREAS.iter().any(|(_, area)| *area == self.0) || FIRST_WORDS.contains(&&*self.0)
    }
}

/// Matches `*` with any bytes, also none, and every other byte with itself. Patterns are a few words long, so
/// backtracking to the last star is cheap.
fn glob_matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at_pattern, mut at_text) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while at_text < text.len() {
        if pattern.get(at_pattern) == Some(&b'*') {
            last_star = Some((at_pattern, at_text));
            at_pattern += 1;
        } else if pattern.get(at_pattern) == Some(&text[at_text]) {
            at_pattern += 1;
            at_text += 1;
        } else if let Some((star, swallowed_to)) = last_star {
            last_star = Some((star, swallowed_to + 1));
            at_pattern = star + 1;
            at_text = swallowed_to + 1;
        } else {
            return false;
        }
    }
    pattern[at_pattern..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite() -> Suite {
        let files = ["http_host.t", "proxy.t", "proxy_cache.t", "rewrite.t", "rewrite_if.t", "stream_ssl.t"];
        Suite { path: PathBuf::new(), files: files.map(str::to_owned).to_vec() }
    }

    #[test]
    fn a_file_belongs_to_the_longest_beginning_or_its_first_word() {
        assert_eq!(area("http_location.t"), "http core");
        assert_eq!(area("proxy_cache_lock.t"), "proxy cache");
        assert_eq!(area("proxy_cookie.t"), "proxy");
        assert_eq!(area("access.t"), "access");
        assert_eq!(area("access_log.t"), "log");
        assert_eq!(area("mirror_proxy.t"), "mirror");
        assert_eq!(area("ssi.t"), "ssi");
        assert_eq!(area("stream_ssl_alpn.t"), "stream ssl");
    }

    #[test]
    fn files_are_chosen_by_area_name_and_glob() {
        let select = |words: &[&str]| suite().select(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>());
        assert_eq!(select(&[]).unwrap().len(), 6);
        assert_eq!(select(&["rewrite"]).unwrap(), ["rewrite.t", "rewrite_if.t"]);
        assert_eq!(select(&["rewrite.t"]).unwrap(), ["rewrite.t"]);
        assert_eq!(select(&["rewrite_if", "http core"]).unwrap(), ["http_host.t", "rewrite_if.t"]);
        assert_eq!(select(&["proxy*"]).unwrap(), ["proxy.t", "proxy_cache.t"]);
        assert!(select(&["rwrite"]).unwrap_err().contains("rwrite"));
    }

    #[test]
    fn a_star_matches_any_text() {
        let matches = |pattern: &str, text: &str| glob_matches(pattern.as_bytes(), text.as_bytes());
        assert!(matches("*", ""));
        assert!(matches("a*c*.t", "abcabc.t"));
        assert!(matches("*_ssl*.t", "stream_ssl.t"));
        assert!(!matches("a*c", "ab"));
        assert!(!matches("proxy", "proxy.t"));
        assert!(!matches("", "x"));
    }
}
