//! `cargo xtask sbom`: writes the packages of the program as CycloneDX 1.6 in JSON (<https://cyclonedx.org>) to
//! `target/sbom/gale.cdx.json`. The output depends only on `Cargo.lock` and cargo's metadata, so the same sources give
//! the same bytes; it has a date only if `SOURCE_DATE_EPOCH` is set. Features enabled only by tests are included, so
//! the list may have packages that are not linked, but is never incomplete.

use std::collections::HashMap;
use std::fs;
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::packages::{Locked, Metadata, Package, Part, read_lock, root};

const USAGE: &str = "usage: cargo xtask sbom [--target TRIPLE] [--output FILE]";

/// Package that contains the program.
const PROGRAM: &str = "gale";

pub fn main(args: &[String]) -> ExitCode {
    let (mut target, mut output) = (None, None);
    let mut rest = args.iter();
    while let Some(option) = rest.next() {
        let place = match option.as_str() {
            "--target" => &mut target,
            "--output" => &mut output,
            _ => return usage(),
        };
        let Some(value) = rest.next() else { return usage() };
        *place = Some(value.clone());
    }
    let output = output.map_or_else(|| root().join("target/sbom/gale.cdx.json"), Into::into);
    let made = target.or_else(crate::host).ok_or_else(|| "rustc does not say what it compiles for".to_owned());
    let written = made.and_then(|target| make(&target)).and_then(|text| {
        output
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&output, text))
            .map_err(|error| format!("{}: {error}", output.display()))
    });
    match written {
        Ok(()) => {
            println!("{}", output.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xtask sbom: {error}");
            ExitCode::from(2)
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn make(target: &str) -> Result<String, String> {
    let (metadata, lock) = (Metadata::read(target)?, read_lock(&root().join("Cargo.lock"))?);
    let date = std::env::var("SOURCE_DATE_EPOCH").ok().map(|seconds| timestamp(&seconds)).transpose()?;
    let document = document(&metadata, &lock, target, date.as_deref())?;
    Ok(serde_json::to_string_pretty(&document).map_err(|error| error.to_string())? + "\n")
}

fn document(metadata: &Metadata, lock: &[Locked], target: &str, date: Option<&str>) -> Result<Value, String> {
    let parts = metadata.parts_of(PROGRAM);
    let mut packages: Vec<&Package> =
        metadata.packages.iter().filter(|package| parts.contains_key(&*package.id)).collect();
    packages.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    let references: HashMap<&str, String> = packages.iter().map(|package| (&*package.id, purl(package))).collect();
    let program = packages.iter().find(|package| package.name == PROGRAM && package.source.is_none());
    let program = *program.ok_or_else(|| format!("there is no package {PROGRAM}"))?;
    let libraries = packages.iter().filter(|package| package.id != program.id);
    let components: Vec<Value> =
        libraries.map(|package| component(package, "library", Some(parts[&*package.id]), lock)).collect();
    let dependencies: Vec<Value> = packages
        .iter()
        .map(|package| {
            let mut needs: Vec<&String> =
                metadata.needs(&package.id).iter().filter_map(|id| references.get(id)).collect();
            needs.sort_unstable();
            needs.dedup();
            json!({ "ref": references[&*package.id], "dependsOn": needs })
        })
        .collect();
    let mut about = json!({
        "component": component(program, "application", None, lock),
        "properties": [{ "name": "cargo:target", "value": target }],
    });
    if let Some(date) = date {
        about["timestamp"] = date.into();
    }
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": about,
        "components": components,
        "dependencies": dependencies,
    }))
}

fn component(package: &Package, kind: &str, part: Option<Part>, lock: &[Locked]) -> Value {
    let mut component = json!({
        "type": kind,
        "bom-ref": purl(package),
        "name": package.name,
        "version": package.version,
        "purl": purl(package),
    });
    if let Some(license) = &package.license {
        // `/` is an old form of `OR`.
        component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
    }
    if let Some(part) = part {
        let scope = if part == Part::OfProgram { "required" } else { "excluded" };
        component["scope"] = scope.into();
    }
    let is_it = |locked: &&Locked| locked.name == package.name && locked.version == package.version;
    if let Some(checksum) = lock.iter().find(is_it).and_then(|locked| locked.checksum.as_ref()) {
        component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
    }
    if let Some(repository) = package.repository.as_ref().filter(|url| !url.is_empty()) {
        component["externalReferences"] = json!([{ "type": "vcs", "url": repository }]);
    }
    component
}

/// Returns the package URL: <https://github.com/package-url/purl-spec>. Gale's own packages are in no registry.
fn purl(package: &Package) -> String {
    let kind = if package.source.is_some() { "cargo" } else { "generic/gale" };
    format!("pkg:{kind}/{}@{}", package.name, package.version.replace('+', "%2B"))
}

/// Formats seconds since 1970 as in RFC 3339.
fn timestamp(seconds: &str) -> Result<String, String> {
    let seconds: u64 = seconds.parse().map_err(|_| format!("SOURCE_DATE_EPOCH={seconds} is no number"))?;
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years. With this start the leap day is the last day of a year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year_of_era + month / 10, (month + 2) % 12 + 1);
    let [hour, minute, second] = [time / 3600, time / 60 % 60, time % 60];
    Ok(format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamp_of_seconds_is_rfc_3339() {
        for (seconds, expected) in [
            ("0", "1970-01-01T00:00:00Z"),
            ("951782399", "2000-02-28T23:59:59Z"),
            ("951782400", "2000-02-29T00:00:00Z"),
            ("951868800", "2000-03-01T00:00:00Z"),
            ("1795824000", "2026-11-28T00:00:00Z"),
            ("4107542399", "2100-02-28T23:59:59Z"),
            ("4107542400", "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(timestamp(seconds).as_deref(), Ok(expected));
        }
        assert!(timestamp("now").is_err());
    }

    #[test]
    fn document_names_packages_once_with_their_checksums() {
        let text = r#"{
            "packages": [
                {"id": "p", "name": "gale", "version": "1.0.0", "license": "MIT", "targets": [{"kind": ["bin"]}]},
                {"id": "l", "name": "library", "version": "1.0.0+2", "license": "MIT/ISC", "source": "r",
                 "repository": "https://example.com", "targets": [{"kind": ["lib"]}]},
                {"id": "t", "name": "tester", "version": "1.0.0", "source": "r", "targets": [{"kind": ["lib"]}]}
            ],
            "resolve": {"nodes": [
                {"id": "p", "deps": [{"pkg": "l", "dep_kinds": [{"kind": null}, {"kind": "build"}]},
                                     {"pkg": "t", "dep_kinds": [{"kind": "dev"}]}]},
                {"id": "l", "deps": []}, {"id": "t", "deps": []}
            ]}
        }"#;
        let metadata: Metadata = serde_json::from_str(text).expect("what cargo says");
        let lock = [Locked {
            name: "library".to_owned(),
            version: "1.0.0+2".to_owned(),
            source: Some("r".to_owned()),
            checksum: Some("abc".to_owned()),
        }];
        let document = document(&metadata, &lock, "target", Some("today")).expect("a document");
        assert_eq!(document["metadata"]["component"]["name"], "gale");
        assert_eq!(document["metadata"]["timestamp"], "today");
        let library = json!({
            "type": "library", "bom-ref": "pkg:cargo/library@1.0.0%2B2", "name": "library", "version": "1.0.0+2",
            "purl": "pkg:cargo/library@1.0.0%2B2", "licenses": [{ "expression": "MIT OR ISC" }], "scope": "required",
            "hashes": [{ "alg": "SHA-256", "content": "abc" }],
            "externalReferences": [{ "type": "vcs", "url": "https://example.com" }],
        });
        assert_eq!(document["components"], json!([library]));
        assert_eq!(
            document["dependencies"],
            json!([
                { "ref": "pkg:generic/gale/gale@1.0.0", "dependsOn": ["pkg:cargo/library@1.0.0%2B2"] },
                { "ref": "pkg:cargo/library@1.0.0%2B2", "dependsOn": [] },
            ])
        );
    }
}
