//! OpenSSL's names of versions, cipher suites and groups, and its expressions for lists of suites
//! (<https://docs.openssl.org/3.5/man1/openssl-ciphers/#cipher-list-format>).
//!
//! Supported are the suites with forward secrecy and authenticated encryption. Other suites in an expression cause a
//! warning.

use std::cmp::Reverse;
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Setting};
use rustls::crypto::aws_lc_rs::{self, cipher_suite as aws, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::{CipherSuite, NamedGroup, ProtocolVersion, SupportedCipherSuite};

use super::commands::Commanded;

/// A suite of TLSv1.2.
struct Suite {
    name: &'static str,
    suite: SupportedCipherSuite,
    /// Words of expressions that include this suite. `RSA` is not among them, since it means a key exchange, nor is
    /// `SHA…`, which means a MAC that these suites do not have.
    words: &'static [&'static str],
    bits: u16,
}

/// In OpenSSL's order.
static SUITES: &[Suite] = &[
    Suite {
        name: "ECDHE-ECDSA-AES256-GCM-SHA384",
        suite: aws::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        words: &["ECDSA", "aECDSA", "AES", "AES256", "AESGCM", "FIPS"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-RSA-AES256-GCM-SHA384",
        suite: aws::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        words: &["aRSA", "AES", "AES256", "AESGCM", "FIPS"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-ECDSA-CHACHA20-POLY1305",
        suite: aws::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        words: &["ECDSA", "aECDSA", "CHACHA20"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-RSA-CHACHA20-POLY1305",
        suite: aws::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        words: &["aRSA", "CHACHA20"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-ECDSA-AES128-GCM-SHA256",
        suite: aws::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        words: &["ECDSA", "aECDSA", "AES", "AES128", "AESGCM", "FIPS"],
        bits: 128,
    },
    Suite {
        name: "ECDHE-RSA-AES128-GCM-SHA256",
        suite: aws::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        words: &["aRSA", "AES", "AES128", "AESGCM", "FIPS"],
        bits: 128,
    },
];

/// Words that mean every suite. `DEFAULT` also does, but only at the start of an expression.
const OF_ALL: &[&str] = &["ALL", "HIGH", "ECDH", "ECDHE", "kECDHE", "EECDH", "kEECDH", "TLSv1.2"];

/// Names that replace the whole expression when it begins with them, longer ones first.
const SUITE_B: &[(&str, &str)] = &[
    ("SUITEB128ONLY", "ECDHE-ECDSA-AES128-GCM-SHA256"),
    ("SUITEB128C2", "ECDHE-ECDSA-AES256-GCM-SHA384"),
    ("SUITEB128", "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384"),
    ("SUITEB192", "ECDHE-ECDSA-AES256-GCM-SHA384"),
];

/// Smallest number of bits at each `@SECLEVEL`.
const LEVEL_BITS: [u16; 6] = [0, 80, 112, 128, 192, 256];

/// Suites of TLSv1.3, which expressions do not affect.
static SUITES_13: &[(&str, SupportedCipherSuite)] = &[
    ("TLS_AES_256_GCM_SHA384", aws::TLS13_AES_256_GCM_SHA384),
    ("TLS_CHACHA20_POLY1305_SHA256", aws::TLS13_CHACHA20_POLY1305_SHA256),
    ("TLS_AES_128_GCM_SHA256", aws::TLS13_AES_128_GCM_SHA256),
];

/// Supported groups, in order of preference.
static GROUPS: &[(&[&str], &dyn SupportedKxGroup)] = &[
    (&["X25519MLKEM768"], kx_group::X25519MLKEM768),
    (&["X25519", "x25519"], kx_group::X25519),
    (&["prime256v1", "P-256", "secp256r1"], kx_group::SECP256R1),
    (&["secp384r1", "P-384"], kx_group::SECP384R1),
    (&["SecP256r1MLKEM768"], kx_group::SECP256R1MLKEM768),
];

/// Groups of `auto`.
const GROUPS_AUTO: usize = 4;

/// Result of an expression.
#[derive(Debug, Default)]
struct Suites {
    /// Suites of TLSv1.2, in order of preference.
    suites: Vec<SupportedCipherSuite>,
    /// Words that match no supported suite.
    missing: Vec<String>,
}

/// Fault of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unfit {
    /// The expression has an invalid command.
    InvalidCommand,
    /// It selects no suite.
    NoMatch,
}

/// The suites under selection, kept as in OpenSSL: a rule moves the suites that it means to an end of the list, and the
/// next rule finds them in this order.
struct Choice {
    /// Suites that no rule has excluded for good, with a flag for those selected.
    listed: Listed,
    bits_min: u16,
    missing: Vec<String>,
}

type Listed = Vec<(usize, bool)>;

/// Evaluates the argument of `ssl_ciphers`.
fn suites(expression: &str) -> Result<Suites, Unfit> {
    let suite_b = SUITE_B.iter().find(|(name, _)| expression.starts_with(name));
    let mut choice =
        Choice { listed: (0..SUITES.len()).map(|index| (index, false)).collect(), bits_min: 0, missing: Vec::new() };
    let expression = match suite_b {
        Some((_, whole)) => whole,
        None => match expression.strip_prefix("DEFAULT") {
            Some(rest) => {
                choice.add(|_| true);
                rest
            }
            None => expression,
        },
    };
    for rule in expression.split([':', ',', ' ', ';']).filter(|rule| !rule.is_empty()) {
        choice.apply(rule)?;
    }
    let chosen = choice.listed.iter().filter(|(_, is_chosen)| *is_chosen).map(|(index, _)| &SUITES[*index]);
    let suites: Vec<_> = chosen.filter(|suite| suite.bits >= choice.bits_min).map(|suite| suite.suite).collect();
    if suites.is_empty() { Err(Unfit::NoMatch) } else { Ok(Suites { suites, missing: choice.missing }) }
}

impl Choice {
    fn apply(&mut self, rule: &str) -> Result<(), Unfit> {
        if let Some(command) = rule.strip_prefix('@') {
            return self.command(command);
        }
        let (operator, text) = match rule.as_bytes()[0] {
            operator @ (b'!' | b'-' | b'+') => (operator, &rule[1..]),
            _ => (b' ', rule),
        };
        if !text.split('+').all(is_word) {
            return Err(Unfit::InvalidCommand);
        }
        let is_meant = |index: usize| is_meant(text, &SUITES[index]);
        match operator {
            b'!' => self.listed.retain(|(index, _)| !is_meant(*index)),
            // The suite removed first comes back first.
            b'-' => {
                let (gone, kept) = self.divided(|index, is_chosen| is_chosen && is_meant(index));
                self.listed = gone.into_iter().map(|(index, _)| (index, false)).chain(kept).collect();
            }
            b'+' => {
                let (moved, kept) = self.divided(|index, is_chosen| is_chosen && is_meant(index));
                self.listed = [kept, moved].concat();
            }
            _ => {
                if !(0..SUITES.len()).any(is_meant) && !SUITES_13.iter().any(|(name, _)| *name == text) {
                    self.missing.push(text.to_owned());
                }
                self.add(is_meant);
            }
        }
        Ok(())
    }

    /// Selects suites, behind those already selected.
    fn add(&mut self, is_meant: impl Fn(usize) -> bool) {
        let (new, kept) = self.divided(|index, is_chosen| !is_chosen && is_meant(index));
        self.listed = kept.into_iter().chain(new.into_iter().map(|(index, _)| (index, true))).collect();
    }

    /// Splits the list by a predicate, keeping the order.
    fn divided(&self, is_so: impl Fn(usize, bool) -> bool) -> (Listed, Listed) {
        self.listed.iter().partition(|(index, is_chosen)| is_so(*index, *is_chosen))
    }

    /// `@STRENGTH`, `@SECLEVEL=N`
    fn command(&mut self, text: &str) -> Result<(), Unfit> {
        // As in OpenSSL, anything joined to a command is ignored.
        let command = text.split('+').next().unwrap_or_default();
        if command == "STRENGTH" {
            self.listed.sort_by_key(|&(index, is_chosen)| is_chosen.then(|| Reverse(SUITES[index].bits)));
            return Ok(());
        }
        let level = command.strip_prefix("SECLEVEL=").and_then(|level| level.parse::<usize>().ok());
        self.bits_min = *level.and_then(|level| LEVEL_BITS.get(level)).ok_or(Unfit::InvalidCommand)?;
        Ok(())
    }
}

/// `true` if OpenSSL reads it as a word.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.=".contains(&byte))
}

/// `true` if words joined by `+` match the suite.
fn is_meant(text: &str, suite: &Suite) -> bool {
    text.split('+').all(|word| {
        word == suite.name || suite.words.contains(&word) || word == iana_name(suite) || OF_ALL.contains(&word)
    })
}

fn iana_name(suite: &Suite) -> &'static str {
    suite.suite.suite().as_str().unwrap_or("")
}

/// The suites of `ssl_ciphers` or `proxy_ssl_ciphers`: those of TLSv1.3 and the selected ones.
///
/// # Errors
/// No suite is selected, in OpenSSL's words.
fn spoken(
    ciphers: &Setting<BString>,
    of_13: &Setting<BString>,
    notes: &mut Vec<Diagnostic>,
) -> Result<Vec<SupportedCipherSuite>, Diagnostic> {
    let expression = ciphers.get();
    let found = suites(&expression.to_str_lossy()).map_err(|unfit| {
        let failed =
            |why: &str| ciphers.error(format!("SSL_CTX_set_cipher_list(\"{expression}\") failed (SSL: error:{why})"));
        match unfit {
            Unfit::InvalidCommand => failed("0A000118:SSL routines::invalid command"),
            Unfit::NoMatch => failed("0A0000B9:SSL routines::no cipher match")
                .hint("Gale supports ECDHE with AES-GCM or ChaCha20-Poly1305, and no ciphers without forward secrecy"),
        }
    })?;
    note_missing("cipher suites", &found.missing, ciphers, notes);
    Ok(suites_13(of_13, notes)?.into_iter().chain(found.suites).collect())
}

/// The suites of TLSv1.3 in a list; all if it is unset.
fn suites_13(list: &Setting<BString>, notes: &mut Vec<Diagnostic>) -> Result<Vec<SupportedCipherSuite>, Diagnostic> {
    let Some(names) = list.get_opt() else { return Ok(SUITES_13.iter().map(|(_, suite)| *suite).collect()) };
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in names.to_str_lossy().split(':').filter(|name| !name.is_empty()) {
        match SUITES_13.iter().find(|(own, _)| *own == name) {
            Some((_, suite)) => found.push(*suite),
            None => missing.push(name.to_owned()),
        }
    }
    if found.is_empty() && !names.is_empty() {
        let message =
            format!("SSL_CTX_set_ciphersuites(\"{names}\") failed (SSL: error:0A0000B9:SSL routines::no cipher match)");
        return Err(list.error(message));
    }
    note_missing("cipher suites", &missing, list, notes);
    Ok(found)
}

fn note_missing(what: &str, missing: &[String], list: &Setting<BString>, notes: &mut Vec<Diagnostic>) {
    if !missing.is_empty() && list.span().is_some() {
        let message = format!("unsupported {what} are ignored: {}", missing.join(":"));
        notes.push(Diagnostic::warn(message).at_opt(list.span()));
    }
}

/// The enabled suites and groups.
///
/// # Errors
/// OpenSSL's error: a list is empty.
pub(super) fn provider(commanded: &Commanded, notes: &mut Vec<Diagnostic>) -> Result<Arc<CryptoProvider>, Diagnostic> {
    let curves = &commanded.curves;
    let cipher_suites = spoken(&commanded.ciphers, &commanded.suites_13, notes)?;
    let (kx_groups, missing) = groups(&curves.get().to_str_lossy());
    if kx_groups.is_empty() {
        return Err(curves.error(format!("SSL_CTX_set1_curves_list(\"{}\") failed", curves.get())));
    }
    note_missing("curves", &missing, curves, notes);
    Ok(Arc::new(CryptoProvider { cipher_suites, kx_groups, ..aws_lc_rs::default_provider() }))
}

/// OpenSSL's name of a suite.
pub fn suite_name(suite: CipherSuite) -> &'static str {
    let of_12 = SUITES.iter().find(|candidate| candidate.suite.suite() == suite).map(|suite| suite.name);
    let of_13 = || SUITES_13.iter().find(|(_, candidate)| candidate.suite() == suite).map(|(name, _)| *name);
    of_12.or_else(of_13).unwrap_or("")
}

/// OpenSSL's name of a group.
pub fn group_name(group: NamedGroup) -> &'static str {
    GROUPS.iter().find(|(_, candidate)| candidate.name() == group).map_or("", |(names, _)| names[0])
}

/// OpenSSL's name of a version.
pub fn version_name(version: ProtocolVersion) -> &'static str {
    match version {
        ProtocolVersion::TLSv1_2 => "TLSv1.2",
        ProtocolVersion::TLSv1_3 => "TLSv1.3",
        _ => "",
    }
}

/// Evaluates the argument of `ssl_ecdh_curve`: the groups, and the names that are not supported.
fn groups(list: &str) -> (Vec<&'static dyn SupportedKxGroup>, Vec<String>) {
    if list == "auto" {
        return (GROUPS[..GROUPS_AUTO].iter().map(|(_, group)| *group).collect(), Vec::new());
    }
    let (mut groups, mut missing) = (Vec::new(), Vec::new());
    for name in list.split([':', '/']).map(|name| name.trim_start_matches(['?', '*'])).filter(|name| !name.is_empty()) {
        match GROUPS.iter().find(|(names, _)| names.iter().any(|own| own.eq_ignore_ascii_case(name))) {
            Some((_, group)) => groups.push(*group),
            None => missing.push(name.to_owned()),
        }
    }
    (groups, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expression: &str) -> Vec<&'static str> {
        let suites = suites(expression).map_or(Vec::new(), |found| found.suites);
        suites.iter().map(|suite| suite_name(suite.suite())).collect()
    }

    /// Lines `EXPRESSION => SUITE ...`, from `openssl ciphers -s -tls1_2 EXPRESSION` (3.0), limited to the supported
    /// suites.
    #[test]
    fn expressions_agree_with_openssl() {
        const SHORT: [(&str, &str); 6] = [
            ("E256", "ECDHE-ECDSA-AES256-GCM-SHA384"),
            ("R256", "ECDHE-RSA-AES256-GCM-SHA384"),
            ("EC", "ECDHE-ECDSA-CHACHA20-POLY1305"),
            ("RC", "ECDHE-RSA-CHACHA20-POLY1305"),
            ("E128", "ECDHE-ECDSA-AES128-GCM-SHA256"),
            ("R128", "ECDHE-RSA-AES128-GCM-SHA256"),
        ];
        let mut wrong = Vec::new();
        for line in include_str!("cipher_expressions.txt").lines() {
            let (expression, expected) = line.split_once(" =>").expect("an expression and its suites");
            let found = match suites(expression) {
                Err(Unfit::InvalidCommand) => "invalid command".to_owned(),
                _ => {
                    let short = |name| SHORT.iter().find(|(_, long)| *long == name).expect("a suite").0;
                    names(expression).into_iter().map(short).collect::<Vec<_>>().join(" ")
                }
            };
            if found != expected.trim() {
                wrong.push(format!("{line} ({found})"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn expressions_choose_as_openssl_does() {
        assert_eq!(names("HIGH:!aNULL:!MD5").len(), 6);
        assert_eq!(names("HIGH:!aNULL:!MD5")[0], "ECDHE-ECDSA-AES256-GCM-SHA384");
        assert_eq!(
            names("EECDH+AESGCM:EDH+AESGCM:!AES256"),
            ["ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-RSA-AES128-GCM-SHA256"]
        );
        assert_eq!(
            names("ECDHE-RSA-AES128-GCM-SHA256:ALL:-ECDSA:@STRENGTH"),
            ["ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-RSA-CHACHA20-POLY1305", "ECDHE-RSA-AES128-GCM-SHA256"]
        );
        assert_eq!(names("aRSA:+AESGCM:!AES128"), ["ECDHE-RSA-CHACHA20-POLY1305", "ECDHE-RSA-AES256-GCM-SHA384"]);
        assert!(names("!ALL:ALL").is_empty() && names("AES256-SHA").is_empty());
        assert_eq!(names("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"), ["ECDHE-RSA-AES128-GCM-SHA256"]);
    }

    #[test]
    fn missing_suites_and_groups_are_named() {
        let list = "ECDHE-RSA-AES128-GCM-SHA256:DHE-RSA-AES128-GCM-SHA256:!RC4:TLS_AES_128_GCM_SHA256:kEDH+AESGCM";
        assert_eq!(suites(list).unwrap().missing, ["DHE-RSA-AES128-GCM-SHA256", "kEDH+AESGCM"]);
        let (found, missing) = groups("X25519:prime256v1:secp521r1");
        assert_eq!((found.len(), missing), (2, vec!["secp521r1".to_owned()]));
        assert_eq!(group_name(groups("auto").0[0].name()), "X25519MLKEM768");
    }
}
