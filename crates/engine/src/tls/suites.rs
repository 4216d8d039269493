//! OpenSSL's names of versions, cipher suites and groups, and its expressions for lists of suites
//! (<https://docs.openssl.org/3.5/man1/openssl-ciphers/#cipher-list-format>).
//!
//! Spoken are the suites that give forward secrecy and authenticated encryption; what an expression asks for beside
//! them cannot be had, and is told.

use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_config::{Diagnostic, Setting};
use rustls::crypto::aws_lc_rs::{self, cipher_suite as aws, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::{CipherSuite, NamedGroup, ProtocolVersion, SupportedCipherSuite};

use super::commands::Commanded;

/// A suite of version 1.2.
struct Suite {
    name: &'static str,
    suite: SupportedCipherSuite,
    /// The words of expressions that mean it, among others.
    words: &'static [&'static str],
    bits: u16,
}

/// In OpenSSL's order.
static SUITES: &[Suite] = &[
    Suite {
        name: "ECDHE-ECDSA-AES256-GCM-SHA384",
        suite: aws::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
        words: &["ECDSA", "aECDSA", "AES", "AES256", "AESGCM", "SHA384"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-RSA-AES256-GCM-SHA384",
        suite: aws::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
        words: &["RSA", "aRSA", "AES", "AES256", "AESGCM", "SHA384"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-ECDSA-CHACHA20-POLY1305",
        suite: aws::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
        words: &["ECDSA", "aECDSA", "CHACHA20", "SHA256"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-RSA-CHACHA20-POLY1305",
        suite: aws::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
        words: &["RSA", "aRSA", "CHACHA20", "SHA256"],
        bits: 256,
    },
    Suite {
        name: "ECDHE-ECDSA-AES128-GCM-SHA256",
        suite: aws::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        words: &["ECDSA", "aECDSA", "AES", "AES128", "AESGCM", "SHA256"],
        bits: 128,
    },
    Suite {
        name: "ECDHE-RSA-AES128-GCM-SHA256",
        suite: aws::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
        words: &["RSA", "aRSA", "AES", "AES128", "AESGCM", "SHA256"],
        bits: 128,
    },
];

/// Words that mean every one of them.
const OF_ALL: &[&str] =
    &["ALL", "DEFAULT", "COMPLEMENTOFDEFAULT", "HIGH", "ECDHE", "kECDHE", "EECDH", "kEECDH", "TLSv1.2", "FIPS"];

/// Words that mean none of them.
const OF_NONE: &[&str] = &[
    "COMPLEMENTOFALL",
    "COMPLEMENTOFDEFAULT",
    "LOW",
    "MEDIUM",
    "EXP",
    "EXPORT",
    "EXPORT40",
    "EXPORT56",
    "eNULL",
    "NULL",
    "aNULL",
    "kRSA",
    "kDHr",
    "kDHd",
    "kDH",
    "DH",
    "DHE",
    "kDHE",
    "EDH",
    "kEDH",
    "ADH",
    "AECDH",
    "aDSS",
    "DSS",
    "aDH",
    "aECDH",
    "ECDH",
    "kECDH",
    "TLSv1.0",
    "TLSv1",
    "SSLv3",
    "SSLv2",
    "AESCCM",
    "AESCCM8",
    "ARIA",
    "ARIA128",
    "ARIA256",
    "ARIAGCM",
    "CAMELLIA",
    "CAMELLIA128",
    "CAMELLIA256",
    "CHACHA20POLY1305",
    "3DES",
    "DES",
    "RC4",
    "RC2",
    "IDEA",
    "SEED",
    "MD5",
    "SHA1",
    "SHA",
    "GOST94",
    "GOST89MAC",
    "aGOST",
    "aGOST01",
    "kGOST",
    "PSK",
    "kPSK",
    "aPSK",
    "kECDHEPSK",
    "kDHEPSK",
    "kRSAPSK",
    "SRP",
    "kSRP",
    "aSRP",
    "SUITEB128",
    "SUITEB128ONLY",
    "SUITEB192",
    "CBC",
];

/// Suites of version 1.3: no expression is about them.
static SUITES_13: &[(&str, SupportedCipherSuite)] = &[
    ("TLS_AES_256_GCM_SHA384", aws::TLS13_AES_256_GCM_SHA384),
    ("TLS_CHACHA20_POLY1305_SHA256", aws::TLS13_CHACHA20_POLY1305_SHA256),
    ("TLS_AES_128_GCM_SHA256", aws::TLS13_AES_128_GCM_SHA256),
];

/// The groups that are spoken, in the order in which they are preferred.
static GROUPS: &[(&[&str], &dyn SupportedKxGroup)] = &[
    (&["X25519MLKEM768"], kx_group::X25519MLKEM768),
    (&["X25519", "x25519"], kx_group::X25519),
    (&["prime256v1", "P-256", "secp256r1"], kx_group::SECP256R1),
    (&["secp384r1", "P-384"], kx_group::SECP384R1),
    (&["SecP256r1MLKEM768"], kx_group::SECP256R1MLKEM768),
];

/// Those of `auto`.
const GROUPS_AUTO: usize = 4;

/// What an expression stands for.
#[derive(Debug, Default)]
struct Suites {
    /// Suites of version 1.2, the preferred ones first.
    suites: Vec<SupportedCipherSuite>,
    /// The words that ask for nothing that can be had.
    missing: Vec<String>,
}

/// Evaluates the argument of `ssl_ciphers`.
fn suites(expression: &str) -> Suites {
    let mut chosen: Vec<usize> = Vec::new();
    let mut killed: Vec<usize> = Vec::new();
    let mut missing = Vec::new();
    for word in expression.split([':', ',', ' ', ';']).filter(|word| !word.is_empty()) {
        if let Some(command) = word.strip_prefix('@') {
            if command == "STRENGTH" {
                chosen.sort_by_key(|&index| std::cmp::Reverse(SUITES[index].bits));
            }
            continue;
        }
        let (operator, text) = match word.as_bytes()[0] {
            operator @ (b'!' | b'-' | b'+') => (operator, &word[1..]),
            _ => (b' ', word),
        };
        let meant: Vec<usize> = (0..SUITES.len()).filter(|&index| is_meant(text, &SUITES[index])).collect();
        match operator {
            b'!' => {
                chosen.retain(|index| !meant.contains(index));
                killed.extend(meant);
            }
            b'-' => chosen.retain(|index| !meant.contains(index)),
            b'+' => {
                let (moved, kept) = chosen.iter().partition::<Vec<usize>, _>(|index| meant.contains(index));
                chosen = [kept, moved].concat();
            }
            _ => {
                if meant.is_empty() && !SUITES_13.iter().any(|(name, _)| *name == text) {
                    missing.push(text.to_owned());
                }
                let new: Vec<usize> =
                    meant.into_iter().filter(|index| !chosen.contains(index) && !killed.contains(index)).collect();
                chosen.extend(new);
            }
        }
    }
    Suites { suites: chosen.into_iter().map(|index| SUITES[index].suite).collect(), missing }
}

/// Whether words joined by `+` mean the suite.
fn is_meant(text: &str, suite: &Suite) -> bool {
    text.split('+').all(|word| {
        let is_own = word == suite.name || suite.words.contains(&word) || word == iana_name(suite);
        is_own || OF_ALL.contains(&word) && !OF_NONE.contains(&word)
    })
}

fn iana_name(suite: &Suite) -> &'static str {
    suite.suite.suite().as_str().unwrap_or("")
}

/// The suites that are spoken as `ssl_ciphers` says, or `proxy_ssl_ciphers`: those of version 1.3 and the chosen ones.
///
/// # Errors
/// None is chosen, in OpenSSL's words.
fn spoken(
    ciphers: &Setting<BString>,
    of_13: &Setting<BString>,
    notes: &mut Vec<Diagnostic>,
) -> Result<Vec<SupportedCipherSuite>, Diagnostic> {
    let expression = ciphers.get();
    let found = suites(&expression.to_str_lossy());
    if found.suites.is_empty() {
        let message = format!(
            "SSL_CTX_set_cipher_list(\"{expression}\") failed (SSL: error:0A0000B9:SSL routines::no cipher match)"
        );
        return Err(ciphers
            .error(message)
            .hint("Gale speaks ECDHE with AES-GCM or ChaCha20-Poly1305, and none that lacks forward secrecy"));
    }
    note_missing("cipher suites", &found.missing, ciphers, notes);
    Ok(suites_13(of_13, notes)?.into_iter().chain(found.suites).collect())
}

/// The suites of version 1.3 that a list names; all of them without one.
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
        let message = format!("{what} that Gale does not have are left out: {}", missing.join(":"));
        notes.push(Diagnostic::warn(message).at_opt(list.span()));
    }
}

/// The suites and groups that are spoken.
///
/// # Errors
/// OpenSSL's: nothing is left of a list.
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

/// Evaluates the argument of `ssl_ecdh_curve`: the groups, and the names that cannot be had.
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
        suites(expression).suites.iter().map(|suite| suite_name(suite.suite())).collect()
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
    fn what_cannot_be_had_is_told() {
        let list = "ECDHE-RSA-AES128-GCM-SHA256:DHE-RSA-AES128-GCM-SHA256:!RC4:TLS_AES_128_GCM_SHA256:kEDH+AESGCM";
        assert_eq!(suites(list).missing, ["DHE-RSA-AES128-GCM-SHA256", "kEDH+AESGCM"]);
        let (found, missing) = groups("X25519:prime256v1:secp521r1");
        assert_eq!((found.len(), missing), (2, vec!["secp521r1".to_owned()]));
        assert_eq!(group_name(groups("auto").0[0].name()), "X25519MLKEM768");
    }
}
