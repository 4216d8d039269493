//! Regular expressions as nginx understands them: PCRE2, with JIT where the
//! machine has it.
//!
//! A pattern is compiled once, when the configuration is read. Named groups
//! become variables of the same name.

use bstr::BStr;
use pcre2::bytes::{CaptureLocations, Regex as Pcre, RegexBuilder};

use super::variables::VariableId;

/// The nine numbered captures `$1` to `$9`, and `$0`.
pub const CAPTURES_MAX: usize = 10;

/// A compiled regular expression.
#[derive(Debug)]
pub struct Regex {
    compiled: Pcre,
    variables: Vec<(usize, VariableId)>,
}

/// A successful search: the expression and where its groups stand.
#[derive(Debug)]
pub struct Match<'r> {
    /// The expression that matched.
    pub regex: &'r Regex,
    /// Where its groups stand.
    pub captures: Captures,
}

/// Where the groups of a match stand in the text that was searched: `[start,
/// end)` per group, `None` for a group that took no part.
#[derive(Clone, Debug, Default)]
pub struct Captures {
    groups: smallvec::SmallVec<[Option<(u32, u32)>; CAPTURES_MAX]>,
}

impl Captures {
    /// The text of group `number` within `subject`, the text that was searched.
    pub fn text<'s>(&self, subject: &'s [u8], number: usize) -> Option<&'s [u8]> {
        let (start, end) = (*self.groups.get(number)?)?;
        subject.get(start as usize..end as usize)
    }

    /// How many groups the expression has, the whole match included.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether nothing was captured yet.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Forgets the match.
    pub fn clear(&mut self) {
        self.groups.clear();
    }
}

impl Regex {
    /// Compiles `pattern`; the error is PCRE2's message in nginx's frame.
    pub fn compile(pattern: &[u8], caseless: bool) -> Result<Regex, String> {
        let pattern = std::str::from_utf8(pattern).map_err(|_| {
            format!("pcre2_compile() failed: the expression is not valid UTF-8 in \"{}\"", BStr::new(pattern))
        })?;
        RegexBuilder::new()
            .caseless(caseless)
            .jit_if_available(true)
            .build(pattern)
            .map(|compiled| Regex { compiled, variables: Vec::new() })
            .map_err(|error| compilation_failed(pattern, &error))
    }

    /// Gives every named group its variable; `variable` finds one by its name.
    pub fn bind(&mut self, mut variable: impl FnMut(&[u8]) -> VariableId) {
        let names = self.compiled.capture_names().iter().enumerate();
        let named = names.filter_map(|(number, name)| Some((number, name.as_deref()?)));
        self.variables = named.map(|(number, name)| (number, variable(name.as_bytes()))).collect();
    }

    /// The variables of the named groups, by the group's number.
    pub fn variables(&self) -> &[(usize, VariableId)] {
        &self.variables
    }

    /// The groups that have names, by their numbers.
    pub fn names(&self) -> impl Iterator<Item = (usize, &str)> {
        let names = self.compiled.capture_names().iter().enumerate();
        names.filter_map(|(number, name)| Some((number, name.as_deref()?)))
    }

    /// Whether `text` matches. An expression that runs into PCRE2's own limits
    /// does not match; the caller may log the error.
    pub fn is_match(&self, text: &[u8]) -> Result<bool, String> {
        self.compiled.is_match(text).map_err(|error| error.to_string())
    }

    /// Searches `text` and keeps where the groups stand.
    pub fn find(&self, text: &[u8]) -> Result<Option<Match<'_>>, String> {
        let mut locations: CaptureLocations = self.compiled.capture_locations();
        let found = self.compiled.captures_read(&mut locations, text).map_err(|error| error.to_string())?;
        if found.is_none() {
            return Ok(None);
        }
        let place = |number| {
            let (start, end) = locations.get(number)?;
            Some((u32::try_from(start).ok()?, u32::try_from(end).ok()?))
        };
        let groups = (0..locations.len()).map(place).collect();
        Ok(Some(Match { regex: self, captures: Captures { groups } }))
    }
}

/// `pcre2_compile() failed: WHY in "PATTERN" at "REST"`; without a rest when the error is at the end.
fn compilation_failed(pattern: &str, error: &pcre2::Error) -> String {
    let text = error.to_string();
    let offset = error.offset().unwrap_or(pattern.len());
    let why = text.strip_prefix(&format!("PCRE2: error compiling pattern at offset {offset}: ")).unwrap_or(&text);
    let rest = pattern.get(offset..).filter(|rest| !rest.is_empty());
    let at = rest.map(|rest| format!(" at \"{rest}\"")).unwrap_or_default();
    format!("pcre2_compile() failed: {why} in \"{pattern}\"{at}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_number_and_name() {
        let mut regex = Regex::compile(br"^/(?<first>\w+)(/(\d+))?", false).unwrap();
        regex.bind(|name| VariableId(u32::try_from(name.len()).unwrap()));
        let subject = b"/abc/";
        let captures = regex.find(subject).unwrap().unwrap().captures;
        assert_eq!(captures.text(subject, 1), Some(&b"abc"[..]));
        assert_eq!(captures.text(subject, 3), None);
        assert_eq!(captures.text(subject, 9), None);
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
}
