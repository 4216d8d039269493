//! File name patterns of `include`: `*`, `?`, `[a-z]`, `[!a-z]` and `\` before a character, as in glob(3).
//!
//! A wildcard matches neither a slash nor the leading dot of a hidden name. Braces and `~` are not special.
//! Invariant: matching backtracks only to the last `*`, so its time is polynomial for every pattern.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum number of paths for one pattern, including the directories on the way.
pub const PATHS_MAX: usize = 1 << 16;

/// Returns `true` if the path contains `*`, `?` or `[`.
pub fn is_pattern(path: &[u8]) -> bool {
    path.iter().any(|byte| matches!(byte, b'*' | b'?' | b'['))
}

/// Returns the existing paths that match, in byte order. An unreadable directory counts as empty.
///
/// # Errors
/// If there are more than [`PATHS_MAX`].
pub fn expand(pattern: &Path) -> io::Result<Vec<PathBuf>> {
    let pattern = pattern.as_os_str().as_bytes();
    let mut components = pattern.split(|&byte| byte == b'/').peekable();
    let mut found: Vec<Vec<u8>> = vec![Vec::new()];
    let mut is_first = true;
    while let Some(component) = components.next() {
        let is_last = components.peek().is_none();
        let mut next = Vec::new();
        for base in &found {
            let base = if is_first { base.clone() } else { [base, &b"/"[..]].concat() };
            if is_pattern(component) {
                list_matching(&base, component, &mut next);
            } else {
                let path = [&base[..], &unescaped(component)].concat();
                // A path found by a wildcard exists; a component after it may not.
                if !is_last || Path::new(OsStr::from_bytes(&path)).symlink_metadata().is_ok() {
                    next.push(path);
                }
            }
            if next.len() > PATHS_MAX {
                return Err(io::Error::other(format!("more than {PATHS_MAX} paths match")));
            }
        }
        found = next;
        is_first = false;
    }
    found.sort();
    Ok(found.iter().map(|path| PathBuf::from(OsStr::from_bytes(path))).collect())
}

/// Returns `true` if the whole path matches the whole pattern, component by component.
pub fn matches_path(pattern: &[u8], path: &[u8]) -> bool {
    let (mut patterns, mut names) = (pattern.split(|&byte| byte == b'/'), path.split(|&byte| byte == b'/'));
    loop {
        match (patterns.next(), names.next()) {
            (None, None) => return true,
            (Some(pattern), Some(name)) if matches_name(pattern, name) => {}
            _ => return false,
        }
    }
}

/// Returns `true` if a name without slashes matches a pattern without slashes.
pub fn matches_name(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && !matches!(pattern, [b'.', ..] | [b'\\', b'.', ..]) {
        return false;
    }
    let (mut p, mut n) = (0, 0);
    // The last `*` and the bytes that it has matched so far. Backtracking to an earlier one would never find more.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p + 1, n));
            p += 1;
        } else if let Some(used) = matches_one(&pattern[p..], name[n]) {
            p += used;
            n += 1;
        } else if let Some((after_star, swallowed)) = star {
            star = Some((after_star, swallowed + 1));
            p = after_star;
            n = swallowed + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

fn list_matching(base: &[u8], component: &[u8], found: &mut Vec<Vec<u8>>) {
    let directory = if base.is_empty() { &b"."[..] } else { base };
    let Ok(entries) = fs::read_dir(OsStr::from_bytes(directory)) else {
        return;
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let matching = names.filter(|name| matches_name(component, name.as_bytes()));
    found.extend(matching.take(PATHS_MAX + 1).map(|name| [base, name.as_bytes()].concat()));
}

/// Matches one byte against the next element of a pattern, which is not a `*`. Returns the length of that element.
fn matches_one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern.first()? {
        b'?' => Some(1),
        b'[' => match class_end(pattern) {
            Some(end) => class_contains(&pattern[1..end], byte).then_some(end + 1),
            // A bracket that is never closed is an ordinary character.
            None => (byte == b'[').then_some(1),
        },
        b'\\' if pattern.len() > 1 => (pattern[1] == byte).then_some(2),
        ordinary => (ordinary == byte).then_some(1),
    }
}

/// Returns the index of the `]` that closes the class at the beginning of `pattern`.
fn class_end(pattern: &[u8]) -> Option<usize> {
    // A `]` right after `[`, `[!` or `[^` is a member of the class.
    let first = if matches!(pattern.get(1), Some(b'!' | b'^')) { 2 } else { 1 };
    let after_first = first + 1;
    pattern.get(after_first..)?.iter().position(|&byte| byte == b']').map(|index| index + after_first)
}

fn class_contains(class: &[u8], byte: u8) -> bool {
    let (negated, mut members) = match class {
        [b'!' | b'^', members @ ..] => (true, members),
        members => (false, members),
    };
    let mut contains = false;
    while let [first, rest @ ..] = members {
        (members, contains) = match rest {
            [b'-', last, rest @ ..] => (rest, contains || (*first..=*last).contains(&byte)),
            rest => (rest, contains || *first == byte),
        };
    }
    contains != negated
}

fn unescaped(component: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(component.len());
    let mut bytes = component.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'\\' => out.extend(bytes.next()),
            byte => out.push(byte),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(pattern: &str, name: &str) -> bool {
        matches_name(pattern.as_bytes(), name.as_bytes())
    }

    #[test]
    fn wildcards_match_names() {
        for (pattern, name) in [
            ("*.conf", "a.conf"),
            ("*", "anything"),
            ("a*b*c", "a--b--b--c"),
            ("?.conf", "a.conf"),
            ("[ab].conf", "b.conf"),
            ("[a-c]x", "bx"),
            ("[!a]x", "bx"),
            ("[]]x", "]x"),
            ("[a-]x", "-x"),
            ("a[", "a["),
            ("\\*", "*"),
            (".*", ".hidden"),
            ("", ""),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn wildcards_do_not_match_other_names() {
        for (pattern, name) in [
            ("*.conf", "a.conf~"),
            ("*.conf", ".conf"),
            ("?", ".a"),
            ("*", ".hidden"),
            ("[.]a", ".a"),
            ("a?", "a"),
            ("[!a]x", "ax"),
            ("[a-c]", "d"),
            ("\\*", "a"),
            ("a", "A"),
            ("", "a"),
        ] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn a_wildcard_stays_within_its_directory() {
        assert!(matches_path(b"/etc/*/x.conf", b"/etc/gale/x.conf"));
        assert!(!matches_path(b"/etc/*.conf", b"/etc/gale/x.conf"));
        assert!(!matches_path(b"/etc/*", b"/etc"));
    }

    #[test]
    fn the_disk_answers_sorted_and_without_hidden_names() {
        let root = std::env::temp_dir().join(format!("gale-config-glob-{}", std::process::id()));
        for name in ["b/2.conf", "b/10.conf", "a/1.conf", "a/.hidden.conf", "a/1.conf.bak"] {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let found = |pattern: &str| {
            let paths = expand(&root.join(pattern)).unwrap();
            paths.iter().map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(found("*/*.conf"), ["a/1.conf", "b/10.conf", "b/2.conf"]);
        assert_eq!(found("[b]/?.conf"), ["b/2.conf"]);
        assert_eq!(found("*/1.conf"), ["a/1.conf"]);
        assert_eq!(found("none/*.conf"), [""; 0]);
        fs::remove_dir_all(&root).unwrap();
    }

    proptest! {
        #[test]
        fn any_bytes_match_or_not(
            pattern in proptest::collection::vec(any::<u8>(), 0..40),
            name in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            matches_path(&pattern, &name);
        }

        #[test]
        fn patterns_full_of_syntax_match_or_not(pattern in r"[\]\[a*?!^.\\-]{0,20}", name in r"[\]a.!-]{0,12}") {
            matches_name(pattern.as_bytes(), name.as_bytes());
        }

        #[test]
        fn a_name_matches_itself_escaped(name in "[^/.][^/]{0,20}") {
            let escape = |c: char| if c.is_ascii() { vec!['\\', c] } else { vec![c] };
            let escaped: String = name.chars().flat_map(escape).collect();
            prop_assert!(matches(&escaped, &name));
            prop_assert!(matches("*", &name));
        }
    }
}
