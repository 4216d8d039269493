//! `cargo xtask deny`: checks licences, sources, banned packages and known advisories of all dependencies, without a
//! network. The rules are those of `deny.toml`, which cargo-deny reads, too. The advisories are in
//! `xtask/advisories.toml`, which is maintained by hand. RustSec's database has later ones: with a network, `cargo deny
//! check` reads it.

use std::fmt;
use std::process::ExitCode;

use semver::{Version, VersionReq};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::packages::{Locked, Metadata, REGISTRY, read_lock, root};

/// Lock files that are checked: the product's and that of the fuzz targets.
const LOCKS: [&str; 2] = ["Cargo.lock", "fuzz/libfuzzer/Cargo.lock"];

/// The part of `deny.toml` that is checked.
#[derive(Debug, Deserialize)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
    advisories: Ignored,
}

#[derive(Debug, Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
}

#[derive(Debug, Deserialize)]
struct Sources {
    #[serde(rename = "allow-registry")]
    registries: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Ignored {
    ignore: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Advisories {
    advisory: Vec<Advisory>,
}

#[derive(Debug, Deserialize)]
struct Advisory {
    id: String,
    package: String,
    /// Versions without the fault. One of them must match.
    sound: Vec<VersionReq>,
    about: String,
}

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// `LOCK: NAME VERSION`
    package: String,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.package, self.what)
    }
}

/// Runs all checks. The exit status tells if they pass.
pub fn main(args: &[String]) -> ExitCode {
    if !args.is_empty() {
        eprintln!("usage: cargo xtask deny");
        return ExitCode::from(2);
    }
    match check() {
        Ok((findings, count)) if findings.is_empty() => {
            println!("deny: {count} packages: licences, sources, bans and advisories hold");
            ExitCode::SUCCESS
        }
        Ok((findings, _)) => {
            findings.iter().for_each(|finding| eprintln!("{finding}"));
            ExitCode::from(1)
        }
        Err(error) => {
            eprintln!("xtask deny: {error}");
            ExitCode::from(2)
        }
    }
}

fn check() -> Result<(Vec<Finding>, usize), String> {
    let rules: Rules = read("deny.toml")?;
    let advisories: Advisories = read("xtask/advisories.toml")?;
    let (mut findings, mut count) = (Vec::new(), 0);
    for lock in LOCKS {
        let packages = read_lock(&root().join(lock))?;
        count += packages.len();
        for package in &packages {
            let found = check_locked(package, &rules, &advisories.advisory)?;
            let name = format!("{lock}: {} {}", package.name, package.version);
            findings.extend(found.into_iter().map(|what| Finding { package: name.clone(), what }));
        }
    }
    let host = crate::host().ok_or("rustc does not say what it compiles for")?;
    for package in &Metadata::read(&host)?.packages {
        if let Some(what) = check_license(package.license.as_deref(), &rules.licenses.allow) {
            findings.push(Finding { package: format!("{} {}", package.name, package.version), what });
        }
    }
    Ok((findings, count))
}

fn read<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    let text = std::fs::read_to_string(root().join(name)).map_err(|error| format!("{name}: {error}"))?;
    toml::from_str(&text).map_err(|error| format!("{name}: {error}"))
}

/// Returns violations of a package: its source, name and version.
fn check_locked(package: &Locked, rules: &Rules, advisories: &[Advisory]) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    if let Some(source) = &package.source {
        let is_allowed = |registry: &String| source.strip_prefix("registry+") == Some(registry);
        if !rules.sources.registries.iter().any(is_allowed) {
            found.push(format!("comes from {source}, which is not allowed"));
        } else if source == REGISTRY && package.checksum.is_none() {
            found.push("has no checksum".to_owned());
        }
    }
    if let Some(ban) = rules.bans.deny.iter().find(|ban| ban.name == package.name) {
        found.push(format!("is banned: {}", ban.reason));
    }
    let version = Version::parse(&package.version).map_err(|error| format!("{}: {error}", package.name))?;
    for advisory in advisories.iter().filter(|advisory| advisory.package == package.name) {
        let is_sound = advisory.sound.iter().any(|sound| sound.matches(&version));
        if !is_sound && !rules.advisories.ignore.contains(&advisory.id) {
            found.push(format!("{}: {}", advisory.id, advisory.about));
        }
    }
    Ok(found)
}

fn check_license(license: Option<&str>, allowed: &[String]) -> Option<String> {
    let Some(license) = license else { return Some("has no licence".to_owned()) };
    match Expression::new(license).evaluate(allowed) {
        Some(true) => None,
        Some(false) => Some(format!("its licence is not allowed: {license}")),
        None => Some(format!("its licence is none of SPDX's expressions: {license}")),
    }
}

/// An SPDX licence expression: names, `WITH`, `AND`, `OR`, parentheses. `/` is an old form of `OR`.
struct Expression {
    words: Vec<String>,
    at: usize,
}

impl Expression {
    fn new(text: &str) -> Expression {
        let text = text.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
        Expression { words: text.split_whitespace().map(str::to_owned).collect(), at: 0 }
    }

    /// Returns true if the allowed licences satisfy it; `None` if it is not an expression.
    fn evaluate(mut self, allowed: &[String]) -> Option<bool> {
        let is_satisfied = self.any(allowed)?;
        (self.at == self.words.len()).then_some(is_satisfied)
    }

    fn take(&mut self, word: &str) -> bool {
        let is_next = self.words.get(self.at).is_some_and(|next| next == word);
        self.at += usize::from(is_next);
        is_next
    }

    fn any(&mut self, allowed: &[String]) -> Option<bool> {
        let mut is_satisfied = self.all(allowed)?;
        while self.take("OR") {
            is_satisfied |= self.all(allowed)?;
        }
        Some(is_satisfied)
    }

    fn all(&mut self, allowed: &[String]) -> Option<bool> {
        let mut is_satisfied = self.one(allowed)?;
        while self.take("AND") {
            is_satisfied &= self.one(allowed)?;
        }
        Some(is_satisfied)
    }

    fn one(&mut self, allowed: &[String]) -> Option<bool> {
        if self.take("(") {
            let is_satisfied = self.any(allowed)?;
            return self.take(")").then_some(is_satisfied);
        }
        let mut name = self.name()?;
        if self.take("WITH") {
            name = format!("{name} WITH {}", self.name()?);
        }
        Some(allowed.contains(&name))
    }

    fn name(&mut self) -> Option<String> {
        let word = self.words.get(self.at).filter(|word| !["AND", "OR", "WITH", "(", ")"].contains(&word.as_str()))?;
        self.at += 1;
        Some(word.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        let text = "licenses.allow = ['MIT']\nadvisories.ignore = ['A-3']
            bans.deny = [{ crate = 'banned', reason = 'of this' }]
            sources.allow-registry = ['https://github.com/rust-lang/crates.io-index']";
        toml::from_str(text).expect("rules")
    }

    fn advisories() -> Vec<Advisory> {
        let text = "[[advisory]]\nid = 'A-1'\npackage = 'one'\nsound = ['>= 1.2.3', '>= 0.9.4, < 1.0.0']\nabout = 'it'
            [[advisory]]\nid = 'A-3'\npackage = 'one'\nsound = []\nabout = 'ignored'";
        toml::from_str::<Advisories>(text).expect("advisories").advisory
    }

    fn locked(name: &str, version: &str, source: Option<&str>, checksum: Option<&str>) -> Locked {
        let text = |text: &str| text.to_owned();
        Locked { name: text(name), version: text(version), source: source.map(text), checksum: checksum.map(text) }
    }

    #[test]
    fn licence_is_allowed_if_its_expression_is_satisfied() {
        let allowed = ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        for (expression, expected) in [
            ("MIT", Some(true)),
            ("GPL-3.0", Some(false)),
            ("MIT OR GPL-3.0", Some(true)),
            ("GPL-3.0/MIT", Some(true)),
            ("MIT AND GPL-3.0", Some(false)),
            ("MIT AND (GPL-3.0 OR ISC)", Some(true)),
            ("(MIT AND GPL-3.0) OR ISC AND MIT", Some(true)),
            ("Apache-2.0 WITH LLVM-exception", Some(true)),
            ("Apache-2.0", Some(false)),
            ("", None),
            ("MIT OR", None),
            ("(MIT", None),
            ("MIT)", None),
            ("MIT ISC", None),
            ("AND MIT", None),
        ] {
            assert_eq!(Expression::new(expression).evaluate(&allowed), expected, "{expression}");
        }
        assert_eq!(check_license(None, &allowed).as_deref(), Some("has no licence"));
    }

    #[test]
    fn package_is_found_by_source_name_and_version() {
        let found = |package: Locked| check_locked(&package, &rules(), &advisories()).expect("a version");
        let usual = |version| locked("one", version, Some(REGISTRY), Some("0"));
        assert!(found(usual("1.2.3")).is_empty() && found(usual("0.9.9")).is_empty());
        assert!(found(locked("own", "0.1.0", None, None)).is_empty());
        assert_eq!(found(usual("1.2.2")), ["A-1: it"]);
        assert_eq!(found(usual("0.9.3")), ["A-1: it"]);
        assert_eq!(found(locked("banned", "1.0.0", None, None)), ["is banned: of this"]);
        assert_eq!(found(locked("two", "1.0.0", Some(REGISTRY), None)), ["has no checksum"]);
        let elsewhere = found(locked("two", "1.0.0", Some("git+https://example.com/two"), None));
        assert_eq!(elsewhere, ["comes from git+https://example.com/two, which is not allowed"]);
        assert!(check_locked(&usual("one"), &rules(), &[]).is_err());
    }
}
