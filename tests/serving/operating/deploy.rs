//! Checks the files for installation and deployment: the versions of all downloads are pinned, and processes have minimal permissions.

use std::{fs, path::Path};

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

#[test]
fn packages_are_installed_by_version_and_hash_only() {
    let makefile = read("Makefile");
    let flags = makefile.lines().find(|line| line.starts_with("PIP := "));
    let flags = flags.expect("the Makefile has the arguments of pip");
    for flag in ["--require-hashes", "--no-deps", "--only-binary :all:"] {
        assert!(flags.contains(flag), "{flags}");
    }
    let installs: Vec<&str> = makefile
        .lines()
        .filter(|line| line.contains("pip") || line.contains("$(PIP)"))
        .filter(|line| !line.starts_with("PIP := "))
        // Skip lines that install the built wheel without a registry.
        .filter(|line| !line.contains("--no-index"))
        .collect();
    assert_eq!(installs.len(), 4, "{installs:#?}");
    for install in installs {
        let (_, file) = install.split_once("$(PIP) -r ").expect(install);
        let text = read(file).replace("\\\n", " ");
        let pins: Vec<&str> = text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .collect();
        assert!(pins.len() >= 3, "{file}");
        for pin in pins {
            let mut words = pin.split_whitespace();
            let version = words.next().and_then(|name| name.split_once("=="));
            assert!(version.is_some(), "{file}: {pin}");
            let hashes: Vec<&str> = words.collect();
            assert!(!hashes.is_empty(), "{file}: {pin}");
            for hash in hashes {
                let digits = hash.strip_prefix("--hash=sha256:").expect(pin);
                assert!(digits.len() == 64 && digits.bytes().all(|c| c.is_ascii_hexdigit()));
            }
        }
    }
}

#[test]
fn a_pod_has_no_token_and_a_network_policy() {
    let manifest = read("deploy/kubernetes.yaml");
    let kind = |kind: &str| {
        let words = format!("\nkind: {kind}\n");
        let mut found = manifest
            .split("\n---\n")
            .filter(|part| part.contains(&words));
        let first = found.next().unwrap_or_else(|| panic!("there is no {kind}"));
        assert!(found.next().is_none(), "{kind}");
        first
    };
    let pod = kind("Deployment");
    for line in [
        "      automountServiceAccountToken: false\n",
        "        runAsNonRoot: true\n",
        "            allowPrivilegeEscalation: false\n",
        "            readOnlyRootFilesystem: true\n",
        "            capabilities: { drop: [ALL] }\n",
    ] {
        assert!(pod.contains(line), "{line}");
    }
    let policy = kind("NetworkPolicy");
    for line in [
        "    matchLabels: { app: gemmule }\n",
        "  policyTypes: [Ingress, Egress]\n",
        "  egress: []\n",
    ] {
        assert!(policy.contains(line), "{line}");
    }
}

#[test]
fn the_image_is_that_of_the_pods() {
    let (image, manifest) = (read("Dockerfile"), read("deploy/kubernetes.yaml"));
    assert!(image.contains("\nUSER 10001:10001\n"));
    assert!(manifest.contains("        runAsUser: 10001\n        fsGroup: 10001\n"));
    assert!(image.contains("    HOME=/home/gemmule "));
    assert!(image.contains("\nVOLUME /home/gemmule/.cache\n"));
    assert!(manifest.contains("mountPath: /home/gemmule/.cache }"));
    assert!(image.contains("\nENTRYPOINT [\"gemmule\"]\n"));
    assert!(image.contains("--require-hashes") && image.contains("-r /nvrtc.txt"));
    // The image has the version of NVRTC that the tests use.
    let pin = read("deploy/nvrtc.txt");
    let pin = pin.split_once("nvidia-cuda-nvrtc==").expect("a pin").1;
    let tested = read("scripts/requirements.txt");
    assert!(tested.contains(&format!("nvidia-cuda-nvrtc=={}", pin.trim_end())));
}

#[test]
fn workflows_call_targets_of_the_makefile() {
    let makefile = read("Makefile");
    for (workflow, targets) in [
        ("test.yml", &["test", "test-python"][..]),
        ("release.yml", &["deb", "wheel"]),
    ] {
        let text = read(&format!(".github/workflows/{workflow}"));
        let called = text.match_indices("- run: make ").map(|(at, run)| {
            let rest = text[at + run.len()..].split_whitespace();
            rest.clone().next().expect("a target")
        });
        assert_eq!(called.collect::<Vec<_>>(), targets, "{workflow}");
        for target in targets {
            assert!(makefile.contains(&format!("\n{target}:")), "{target}");
        }
        assert!(text.contains("\npermissions:\n  contents: read\n"));
    }
}
