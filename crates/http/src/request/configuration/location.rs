//! Finds the location for a URI by nginx's rules, on a radix tree.
//!
//! An exact location (`=`) ends the search. Otherwise the longest prefix is
//! remembered, the search goes on among the locations nested in it, and unless
//! that prefix said `^~` the regular expressions are tried in the order of the
//! file, innermost level first. Named locations take no part.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#location>)

use gale_base::radix::PrefixTree;
use hashbrown::HashMap;

use crate::request::variables::regex::{Match, Regex};
use gale_engine::configuration::ScopeId;

/// The locations of one level: those of a server, or nested in a location.
#[derive(Debug, Default)]
pub struct Locations {
    exact: HashMap<Box<[u8]>, ScopeId>,
    prefixes: PrefixTree<Prefix>,
    regexes: Vec<(Regex, ScopeId)>,
    /// Levels nested in a location of this level, by the location's scope.
    nested: HashMap<ScopeId, Locations>,
}

#[derive(Clone, Copy, Debug)]
struct Prefix {
    scope: ScopeId,
    /// `^~`: no regular expression is tried when this prefix is the longest.
    final_prefix: bool,
}

/// URIs that a location matches.
#[derive(Debug)]
pub enum Pattern {
    /// `location = /uri`
    Exact(Box<[u8]>),
    /// `location /uri` and, with `final_prefix`, `location ^~ /uri`
    Prefix {
        /// The beginning of matching URIs.
        prefix: Box<[u8]>,
        /// Written with `^~`.
        final_prefix: bool,
    },
    /// `location ~ expression` and `location ~* expression`
    Regex(Regex),
    /// `location @name`
    Named(Box<[u8]>),
}

/// Result of a search.
#[derive(Debug)]
pub struct Found<'l> {
    /// The scope of the location.
    pub scope: ScopeId,
    /// The match, if the location has a regular expression.
    pub matched: Option<Match<'l>>,
}

/// The search failed: a regular expression hit PCRE2's limits.
#[derive(Debug)]
pub struct SearchError(pub String);

impl Locations {
    /// Adds a location; returns `false` if the level has one with the same pattern already.
    /// Named locations belong to the server and are not kept here.
    pub fn insert(&mut self, pattern: Pattern, scope: ScopeId, nested: Locations) -> bool {
        let is_new = match pattern {
            Pattern::Exact(uri) => self.exact.insert(uri, scope).is_none(),
            Pattern::Prefix { prefix, final_prefix } => {
                let entry = Prefix { scope, final_prefix };
                self.prefixes.insert(&prefix, entry).is_none()
            }
            Pattern::Regex(regex) => {
                self.regexes.push((regex, scope));
                true
            }
            Pattern::Named(_) => true,
        };
        if !nested.is_empty() {
            self.nested.insert(scope, nested);
        }
        is_new
    }

    /// `true` if the level has no locations.
    pub fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.prefixes.is_empty() && self.regexes.is_empty()
    }

    /// Returns the location named `uri` followed by a slash, unless a location has exactly the name `uri`.
    pub fn find_slashed(&self, uri: &[u8]) -> Option<ScopeId> {
        if self.exact.contains_key(uri) {
            return None;
        }
        if let Some((prefix, length)) = self.prefixes.longest_prefix(uri)
            && length == uri.len()
        {
            return self.nested.get(&prefix.scope)?.find_slashed(uri);
        }
        let slashed = [uri, b"/"].concat();
        if let Some(&scope) = self.exact.get(&*slashed) {
            return Some(scope);
        }
        match self.prefixes.longest_prefix(&slashed)? {
            (prefix, length) if length == slashed.len() => Some(prefix.scope),
            (prefix, _) => self.nested.get(&prefix.scope)?.find_slashed(uri),
        }
    }

    /// The location for `uri`, the normalised path.
    pub fn find(&self, uri: &[u8]) -> Result<Option<Found<'_>>, SearchError> {
        self.search(uri).map(|outcome| match outcome {
            Outcome::Final(found) | Outcome::Prefix(found) => Some(found),
            Outcome::Nothing => None,
        })
    }

    fn search(&self, uri: &[u8]) -> Result<Outcome<'_>, SearchError> {
        if !self.exact.is_empty()
            && let Some(&scope) = self.exact.get(uri)
        {
            return Ok(Outcome::Final(Found { scope, matched: None }));
        }
        let mut best = Outcome::Nothing;
        let mut tries_regexes = true;
        if let Some((prefix, _)) = self.prefixes.longest_prefix(uri) {
            tries_regexes = !prefix.final_prefix;
            best = Outcome::Prefix(Found { scope: prefix.scope, matched: None });
            if let Some(nested) = self.nested.get(&prefix.scope) {
                match nested.search(uri)? {
                    Outcome::Nothing => {}
                    Outcome::Final(found) => return Ok(Outcome::Final(found)),
                    // A nested `^~` applies to its own level only.
                    inner @ Outcome::Prefix(_) => best = inner,
                }
            }
        }
        if tries_regexes {
            for (regex, scope) in &self.regexes {
                if let Some(matched) = regex.find(uri).map_err(SearchError)? {
                    return self.found_by_regex(*scope, matched, uri).map(Outcome::Final);
                }
            }
        }
        Ok(best)
    }

    /// Continues the search among the locations nested in a location found by its regular expression.
    fn found_by_regex<'l>(&'l self, scope: ScopeId, matched: Match<'l>, uri: &[u8]) -> Result<Found<'l>, SearchError> {
        let inner = match self.nested.get(&scope) {
            Some(nested) => nested.find(uri)?,
            None => None,
        };
        // The groups stay those of the last expression that matched.
        Ok(match inner {
            Some(inner) => Found { scope: inner.scope, matched: inner.matched.or(Some(matched)) },
            None => Found { scope, matched: Some(matched) },
        })
    }
}

enum Outcome<'l> {
    /// An exact match or a regular expression: nothing may replace it.
    Final(Found<'l>),
    /// The longest prefix: a regular expression of an outer level may still replace it.
    Prefix(Found<'l>),
    Nothing,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Pattern {
        Pattern::Prefix { prefix: text.as_bytes().into(), final_prefix: false }
    }

    fn final_prefix(text: &str) -> Pattern {
        Pattern::Prefix { prefix: text.as_bytes().into(), final_prefix: true }
    }

    fn regex(text: &str) -> Pattern {
        Pattern::Regex(Regex::compile(text.as_bytes(), false).unwrap())
    }

    fn level(rows: Vec<(Pattern, u32, Locations)>) -> Locations {
        let mut locations = Locations::default();
        for (pattern, scope, nested) in rows {
            assert!(locations.insert(pattern, ScopeId(scope), nested));
        }
        locations
    }

    fn leaf() -> Locations {
        Locations::default()
    }

    #[track_caller]
    fn finds(locations: &Locations, uri: &str, scope: u32) {
        let found = locations.find(uri.as_bytes()).unwrap();
        assert_eq!(found.map(|found| found.scope), Some(ScopeId(scope)), "{uri}");
    }

    #[test]
    fn the_documentation_s_own_example() {
        let locations = level(vec![
            (Pattern::Exact(b"/".as_slice().into()), 1, leaf()),
            (prefix("/"), 2, leaf()),
            (prefix("/documents/"), 3, leaf()),
            (final_prefix("/images/"), 4, leaf()),
            (regex(r"\.(gif|jpg|jpeg)$"), 5, leaf()),
        ]);
        finds(&locations, "/", 1);
        finds(&locations, "/index.html", 2);
        finds(&locations, "/documents/document.html", 3);
        finds(&locations, "/images/1.gif", 4);
        finds(&locations, "/documents/1.jpg", 5);
    }

    #[test]
    fn a_location_is_found_without_its_slash_unless_there_is_one_for_exactly_that() {
        let inner = level(vec![(prefix("/a/b/"), 3, leaf())]);
        let exact = (Pattern::Exact(b"/c".as_slice().into()), 4, leaf());
        let within = level(vec![(prefix("/g/"), 8, leaf())]);
        let locations = level(vec![
            (prefix("/a/"), 1, inner),
            (prefix("/c/"), 2, leaf()),
            exact,
            (prefix("/d"), 5, leaf()),
            (prefix("/f"), 6, leaf()),
            (final_prefix("/f/"), 7, leaf()),
            (prefix("/g"), 9, within),
        ]);
        let find = |uri: &str| locations.find_slashed(uri.as_bytes()).map(|scope| scope.0);
        assert_eq!(["/a", "/a/b", "/g"].map(find), [Some(1), Some(3), Some(8)]);
        assert_eq!(["/c", "/d", "/e", "", "/f"].map(find), [None; 5]);
    }

    #[test]
    fn nested_levels_are_searched_before_the_outer_regular_expressions() {
        let inner = level(vec![(prefix("/a/b"), 2, leaf()), (regex("x$"), 3, leaf())]);
        let locations = level(vec![(prefix("/a"), 1, inner), (regex("[xy]$"), 4, leaf())]);
        finds(&locations, "/a/1", 1);
        finds(&locations, "/a/b1", 2);
        finds(&locations, "/a/bx", 3);
        finds(&locations, "/a/by", 4);
    }

    #[test]
    fn a_final_prefix_shuts_out_the_expressions_of_its_own_level_only() {
        let inner = level(vec![(final_prefix("/a/b"), 2, leaf()), (regex("x$"), 3, leaf())]);
        let locations = level(vec![(prefix("/a"), 1, inner), (regex("y$"), 4, leaf())]);
        finds(&locations, "/a/bx", 2);
        finds(&locations, "/a/by", 4);
        finds(&locations, "/a/x", 3);
    }

    #[test]
    fn the_first_regular_expression_that_matches_wins_and_gives_its_captures() {
        let locations = level(vec![(regex("^/(a)"), 1, leaf()), (regex("^/(.)"), 2, leaf())]);
        let found = locations.find(b"/ab").unwrap().unwrap();
        assert_eq!(found.scope, ScopeId(1));
        assert_eq!(found.matched.unwrap().captures.text(b"/ab", 1), Some(&b"a"[..]));
        finds(&locations, "/b", 2);
        assert!(locations.find(b"*").unwrap().is_none());
    }

    #[test]
    fn the_same_pattern_twice_is_told() {
        let mut locations = level(vec![(prefix("/a"), 1, leaf())]);
        assert!(!locations.insert(prefix("/a"), ScopeId(2), leaf()));
    }
}
