//! Regular expressions as in nginx: PCRE2, with JIT where available.
//!
//! A pattern is compiled once, when the configuration is read. Named groups become variables of the same name.
//!
//! Searches are bounded: catastrophic backtracking on a client's text ends with PCRE2's error after at most some
//! milliseconds.

use std::sync::{Arc, OnceLock};

use bstr::BStr;
use pcre2::bytes::{CaptureLocations, Regex as Pcre, RegexBuilder};

use crate::variables::VariableId;

/// Captures `$0` to `$9`.
pub const CAPTURES_MAX: usize = 10;

/// PCRE2's match limit, prefixed to each pattern. PCRE2's default of ten million would block a loop for a tenth of a
/// second or more. This limit takes 2 to 5 ms, and 10 to 13 ms without JIT; it allows 60 steps for each byte of the
/// longest URI.
const STEPS_MAX: &str = "(*LIMIT_MATCH=500000)";

/// PCRE2's error code if the JIT stack of 32 KiB is too small.
const JIT_STACK_LIMIT: i32 = -46;

/// A compiled regular expression. Clones share the code, which takes kilobytes.
#[derive(Clone, Debug)]
pub struct Regex {
    code: Arc<Code>,
    variables: Vec<(usize, VariableId)>,
}

#[derive(Debug)]
struct Code {
    compiled: Pcre,
    /// The same without JIT, which needs no stack; compiled when first needed.
    interpreted: OnceLock<Pcre>,
    is_caseless: bool,
    /// `true` if it has groups besides the whole match.
    has_groups: bool,
}

/// A successful search: the expression and its groups.
#[derive(Debug)]
pub struct Match<'r> {
    /// The expression that matched.
    pub regex: &'r Regex,
    /// The groups.
    pub captures: Captures,
}

/// Positions of a match's groups in the searched text: `[start, end)` for each group, `None` for a group that did not
/// participate.
#[derive(Clone, Debug, Default)]
pub struct Captures {
    groups: smallvec::SmallVec<[Option<(u32, u32)>; CAPTURES_MAX]>,
}

impl Captures {
    /// Text of group `number`; `text` is the searched text.
    pub fn text<'s>(&self, text: &'s [u8], number: usize) -> Option<&'s [u8]> {
        let (start, end) = (*self.groups.get(number)?)?;
        text.get(start as usize..end as usize)
    }

    /// Number of groups of the expression, including the whole match.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// `true` if nothing was captured yet.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Removes the match.
    pub fn clear(&mut self) {
        self.groups.clear();
    }
}

impl Regex {
    /// Compiles `pattern`; the error is PCRE2's message in nginx's form.
    pub fn compile(pattern: &[u8], caseless: bool) -> Result<Regex, String> {
        let pattern = std::str::from_utf8(pattern).map_err(|_| {
            format!("pcre2_compile() failed: the expression is not valid UTF-8 in \"{}\"", BStr::new(pattern))
        })?;
        build(pattern, caseless, true)
            .map(|compiled| Code {
                has_groups: compiled.captures_len() > 1,
                compiled,
                interpreted: OnceLock::new(),
                is_caseless: caseless,
            })
            .map(|code| Regex { code: Arc::new(code), variables: Vec::new() })
            .map_err(|error| compilation_failed(pattern, &error))
    }

    /// Assigns variables to the named groups; `variable` returns one by name.
    pub fn bind(&mut self, mut variable: impl FnMut(&[u8]) -> VariableId) {
        let names = self.code.compiled.capture_names().iter().enumerate();
        let named = names.filter_map(|(number, name)| Some((number, name.as_deref()?)));
        self.variables = named.map(|(number, name)| (number, variable(name.as_bytes()))).collect();
    }

    /// Variables of the named groups, with the group numbers.
    pub fn variables(&self) -> &[(usize, VariableId)] {
        &self.variables
    }

    /// Number of groups besides the whole match.
    pub fn groups(&self) -> usize {
        self.code.compiled.captures_len() - 1
    }

    /// Named groups, with their numbers.
    pub fn names(&self) -> impl Iterator<Item = (usize, &str)> {
        let names = self.code.compiled.capture_names().iter().enumerate();
        names.filter_map(|(number, name)| Some((number, name.as_deref()?)))
    }

    /// The expression as written.
    pub fn pattern(&self) -> &str {
        self.code.compiled.as_str().strip_prefix(STEPS_MAX).unwrap_or_default()
    }

    /// `true` if `text` matches. The error is that of [`Regex::find`].
    pub fn is_match(&self, text: &[u8]) -> Result<bool, String> {
        self.run(text, |compiled| compiled.is_match(text))
    }

    /// Searches `text` and returns the groups. The error, in nginx's words, means that the search took too many steps.
    pub fn find(&self, text: &[u8]) -> Result<Option<Match<'_>>, String> {
        self.run(text, |compiled| self.search(compiled, text))
    }

    fn run<T>(&self, text: &[u8], search: impl Fn(&Pcre) -> Result<T, pcre2::Error>) -> Result<T, String> {
        let found = match search(&self.code.compiled) {
            Err(error) if error.code() == JIT_STACK_LIMIT => search(self.interpreted()),
            found => found,
        };
        found.map_err(|error| {
            let (text, pattern) = (BStr::new(text), self.pattern());
            format!("pcre2_match() failed: {} on \"{text}\" using \"{pattern}\"", error.code())
        })
    }

    /// Most searches find nothing (one of many locations matches), and only a match needs memory for groups.
    fn search(&self, compiled: &Pcre, text: &[u8]) -> Result<Option<Match<'_>>, pcre2::Error> {
        let place = |(start, end): (usize, usize)| Some((u32::try_from(start).ok()?, u32::try_from(end).ok()?));
        let groups = if !self.code.has_groups {
            let Some(found) = compiled.find(text)? else { return Ok(None) };
            [place((found.start(), found.end()))].into_iter().collect()
        } else {
            if !compiled.is_match(text)? {
                return Ok(None);
            }
            let mut locations: CaptureLocations = compiled.capture_locations();
            compiled.captures_read(&mut locations, text)?;
            (0..locations.len()).map(|number| locations.get(number).and_then(place)).collect()
        };
        Ok(Some(Match { regex: self, captures: Captures { groups } }))
    }

    fn interpreted(&self) -> &Pcre {
        self.code.interpreted.get_or_init(|| {
            build(self.pattern(), self.code.is_caseless, false).expect("an expression that was compiled before")
        })
    }
}

fn build(pattern: &str, caseless: bool, jit: bool) -> Result<Pcre, pcre2::Error> {
    RegexBuilder::new().caseless(caseless).jit_if_available(jit).build(&format!("{STEPS_MAX}{pattern}"))
}

/// `pcre2_compile() failed: WHY in "PATTERN" at "REST"`; without the rest if the error is at the end.
fn compilation_failed(pattern: &str, error: &pcre2::Error) -> String {
    let text = error.to_string();
    let written = error.offset().unwrap_or(STEPS_MAX.len() + pattern.len());
    let offset = written.saturating_sub(STEPS_MAX.len());
    let why = text.strip_prefix(&format!("PCRE2: error compiling pattern at offset {written}: ")).unwrap_or(&text);
    let rest = pattern.get(offset..).filter(|rest| !rest.is_empty());
    let at = rest.map(|rest| format!(" at \"{rest}\"")).unwrap_or_default();
    format!("pcre2_compile() failed: {why} in \"{pattern}\"{at}")
}

#[cfg(test)]
mod tests {
    use gale_config::Statement;

    use super::*;
    use crate::variables::VariablesDraft;

    #[test]
    fn groups_are_found_by_number_and_name() {
        let mut regex = Regex::compile(br"^/(?<first>\w+)(/(\d+))?", false).unwrap();
        regex.bind(|name| VariableId(u32::try_from(name.len()).unwrap()));
        let text = b"/abc/";
        let captures = regex.find(text).unwrap().unwrap().captures;
        assert_eq!(captures.text(text, 1), Some(&b"abc"[..]));
        assert_eq!(captures.text(text, 3), None);
        assert_eq!(captures.text(text, 9), None);
        assert_eq!(regex.variables(), [(1, VariableId(5))]);
    }

    #[test]
    fn caseless_and_broken_expressions() {
        assert!(Regex::compile(b"\\.PHP$", true).unwrap().is_match(b"/a.php").unwrap());
        assert!(!Regex::compile(b"\\.PHP$", false).unwrap().is_match(b"/a.php").unwrap());
        let error = |pattern: &[u8]| Regex::compile(pattern, false).unwrap_err();
        assert_eq!(error(b"(a"), "pcre2_compile() failed: missing closing parenthesis in \"(a\"");
        let message = "pcre2_compile() failed: quantifier does not follow a repeatable item in \"a|*bc\" at \"";
        assert!(error(b"a|*bc").starts_with(message), "{}", error(b"a|*bc"));
        assert!(Regex::compile(b"\xff", false).is_err());
    }

    #[test]
    fn an_expression_that_explodes_ends_with_an_error() {
        let mut text = vec![b'a'; 100];
        text.push(b'!');
        for pattern in ["^(a+)+$", "^(a|aa)+$", "(x+x+)+y|(a+a+)+z"] {
            let regex = Regex::compile(pattern.as_bytes(), false).unwrap();
            let error = regex.find(&text).unwrap_err();
            let text = BStr::new(&text);
            assert_eq!(error, format!("pcre2_match() failed: -47 on \"{text}\" using \"{pattern}\""));
        }
        // Without such backtracking there are enough steps for the longest text.
        assert!(Regex::compile(b"(?:[a-z]+/)*b$", false).unwrap().find(&vec![b'a'; 8192]).unwrap().is_none());
    }

    #[test]
    fn a_text_that_is_too_long_for_compiled_code_is_searched_without() {
        let regex = Regex::compile(br"^(?:a|(b))*$", false).unwrap();
        let text = vec![b'b'; 8000];
        let found = regex.find(&text).unwrap().unwrap();
        assert_eq!(found.captures.text(&text, 1), Some(&b"b"[..]));
        assert!(regex.code.interpreted.get().is_some());
    }

    #[test]
    fn the_same_expression_is_compiled_once_for_a_configuration() {
        let mut draft = VariablesDraft::<()>::default();
        let word = Statement::synthetic(r"\.php$", Vec::new()).name;
        let mut regex = |caseless| draft.regex(&word, &word.text, caseless).unwrap();
        let (one, same, other) = (regex(false), regex(false), regex(true));
        assert!(Arc::ptr_eq(&one.code, &same.code));
        assert!(!one.is_match(b"/A.PHP").unwrap() && other.is_match(b"/A.PHP").unwrap());
    }
}
