PRAGMA user_version = 4;
BEGIN TRANSACTION;
CREATE TABLE checkpoint (
	checkpoint_digest VARCHAR(71) NOT NULL, 
	weights_digest VARCHAR(71) NOT NULL, 
	format VARCHAR NOT NULL, 
	format_version VARCHAR, 
	kind VARCHAR NOT NULL, 
	step BIGINT, 
	tensors BIGINT NOT NULL, 
	parameters BIGINT NOT NULL, 
	nbytes BIGINT NOT NULL, 
	PRIMARY KEY (checkpoint_digest)
);
INSERT INTO "checkpoint" VALUES('sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',100,2,17,68);
INSERT INTO "checkpoint" VALUES('sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','orbax',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','sha256:897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d','dcp',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('sha256:b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','t5x',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','huggingface',NULL,'params',NULL,2,17,68);
INSERT INTO "checkpoint" VALUES('blake3:d413b781dbbfca725815d92a9ca7572e8c73d18f7f33e24a103d5029fdddee09','blake3:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974','dcp',NULL,'params',NULL,2,17,68);
CREATE TABLE conversion (
	statement INTEGER NOT NULL, 
	source VARCHAR(71) NOT NULL, 
	source_uri VARCHAR NOT NULL, 
	source_fingerprint VARCHAR NOT NULL, 
	target VARCHAR(71) NOT NULL, 
	target_uri VARCHAR NOT NULL, 
	format VARCHAR NOT NULL, 
	plan_digest VARCHAR(64) NOT NULL, 
	options TEXT NOT NULL, 
	software VARCHAR NOT NULL, 
	lossless BOOLEAN NOT NULL, 
	time VARCHAR NOT NULL, 
	PRIMARY KEY (statement), 
	FOREIGN KEY(statement) REFERENCES statement (seq), 
	FOREIGN KEY(source) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(target) REFERENCES checkpoint (checkpoint_digest)
);
INSERT INTO "conversion" VALUES(1,'sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','/checkpoints/run/100','41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506','sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','orbax','4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:10:30.000+00:00');
INSERT INTO "conversion" VALUES(2,'sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','huggingface','c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6','{"scan_layers":true}','0.1.0',0,'2026-11-01T02:20:30.000+00:00');
INSERT INTO "conversion" VALUES(3,'sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/archive/run-orbax','orbax','cdf09957368ab6fe13f51c56dbdf32ac7d393f3943c1ff1dab14e34090b93072','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:30:30.000+00:00');
INSERT INTO "conversion" VALUES(12,'sha256:b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','/checkpoints/run/100','0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0','sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','huggingface','96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:40:30.000+00:00');
INSERT INTO "conversion" VALUES(17,'sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249','blake3:d413b781dbbfca725815d92a9ca7572e8c73d18f7f33e24a103d5029fdddee09','/checkpoints/run-dcp','dcp','c74319ccc9ea9477e3e2ce106cbb673bf619124a9d2b993cdbc1e02f4d2a5a6c','{"scan_layers":true}','0.1.0',1,'2026-11-01T02:50:30.000+00:00');
CREATE TABLE edge (
	source VARCHAR(71) NOT NULL, 
	target VARCHAR(71) NOT NULL, 
	plan_digest VARCHAR(64) NOT NULL, 
	statement INTEGER NOT NULL, 
	UNIQUE (source, target, plan_digest), 
	FOREIGN KEY(source) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(target) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "edge" VALUES('sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b',1);
INSERT INTO "edge" VALUES('sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6',2);
INSERT INTO "edge" VALUES('sha256:b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed',12);
INSERT INTO "edge" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','blake3:d413b781dbbfca725815d92a9ca7572e8c73d18f7f33e24a103d5029fdddee09','c74319ccc9ea9477e3e2ce106cbb673bf619124a9d2b993cdbc1e02f4d2a5a6c',17);
CREATE TABLE location (
	checkpoint_digest VARCHAR(71) NOT NULL, 
	uri VARCHAR NOT NULL, 
	fingerprint VARCHAR NOT NULL, 
	seen VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, uri), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "location" VALUES('sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d','/checkpoints/run/100','41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506','2026-11-02T00:00:12.000+00:00',13);
INSERT INTO "location" VALUES('sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/checkpoints/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:08.000+00:00',9);
INSERT INTO "location" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','/checkpoints/run-hf','2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249','2026-11-02T00:00:18.000+00:00',17);
INSERT INTO "location" VALUES('sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','/archive/run-orbax','f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd','2026-11-02T00:00:02.000+00:00',3);
INSERT INTO "location" VALUES('sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','/checkpoints/only-verified','3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d','2026-11-02T00:00:10.000+00:00',11);
INSERT INTO "location" VALUES('sha256:b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49','/checkpoints/run/100','0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0','2026-11-02T00:00:11.000+00:00',12);
INSERT INTO "location" VALUES('sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16','2026-11-02T00:00:14.000+00:00',15);
INSERT INTO "location" VALUES('blake3:d413b781dbbfca725815d92a9ca7572e8c73d18f7f33e24a103d5029fdddee09','/checkpoints/run-dcp','1c5f902ea0766a9972a3e5522a1821218c7704695f67d9c676b45c29a4f1b27c','2026-11-02T00:00:18.000+00:00',17);
CREATE TABLE projection (
	name VARCHAR NOT NULL, 
	delivered INTEGER NOT NULL, 
	failed TEXT, 
	tried VARCHAR NOT NULL, 
	seal VARCHAR(64) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "projection" VALUES('openlineage',4,'statement 5: nobody listens','2026-11-02T00:00:17.000+00:00','89e5663700207f7e823057ca530ce2fa5a21b2a5507af61776aefd6bbfaeee6f');
CREATE TABLE registration (
	checkpoint_digest VARCHAR(71) NOT NULL, 
	registry VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	version VARCHAR, 
	seen VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, registry, name), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "registration" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','https://models.example','model','registered','1','2026-11-02T00:00:07.000+00:00',8);
INSERT INTO "registration" VALUES('sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26','https://models.example','model','pending',NULL,'2026-11-02T00:00:08.000+00:00',9);
INSERT INTO "registration" VALUES('sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','https://models.example','dropped','released',NULL,'2026-11-02T00:00:10.000+00:00',11);
CREATE TABLE statement (
	seq INTEGER NOT NULL, 
	prev VARCHAR(64) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	kind VARCHAR NOT NULL, 
	schema INTEGER NOT NULL, 
	content VARCHAR(64) NOT NULL, 
	body TEXT NOT NULL, 
	time VARCHAR NOT NULL, 
	storage_time VARCHAR NOT NULL, 
	PRIMARY KEY (seq), 
	UNIQUE (hash)
);
INSERT INTO "statement" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000','8f4d12aa158dc7ceca4b6c1a034224ebf71ef5afabaf3fb4430d991858807496','conversion',4,'11d09a920d32873351f02ea147608aa00c6dc0b9513429c54ed08977932ce78f','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:10:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"4b29051ea5cec38a961d064308a01dace2835d6756be84b7fb6609c0ff3c8f1b","resumed_bytes":0,"schema":2,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","fingerprint":"41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":100,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:10:00.000+00:00","target":{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:00.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(2,'8f4d12aa158dc7ceca4b6c1a034224ebf71ef5afabaf3fb4430d991858807496','0ae7034a88084a9c1753c2644da84f82c00fd6bb1794b53b65261705ebdf78d0','conversion',4,'8876d2414a51e41a060f06b9451e474cde128247aec6d85ab4b32ca274f3c657','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:20:30.000+00:00","group":"","lossless":false,"note":null,"options":{"scan_layers":true},"plan_digest":"c58801ff5347882c3e2b5f6a674de035e61dcc15ac314c54d745c0a69f8087f6","resumed_bytes":0,"schema":2,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:20:00.000+00:00","target":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:01.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(3,'0ae7034a88084a9c1753c2644da84f82c00fd6bb1794b53b65261705ebdf78d0','7649d99bc96d870f95a0db2592096fa624c61aa8195c3ed0661afe3fc8bc6a97','conversion',4,'b21630c72cba3a65049a6b9f445618e7d7b15d198bd28d670d1086962963c39e','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:30:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"cdf09957368ab6fe13f51c56dbdf32ac7d393f3943c1ff1dab14e34090b93072","resumed_bytes":0,"schema":2,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:30:00.000+00:00","target":{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/archive/run-orbax","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:02.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(4,'7649d99bc96d870f95a0db2592096fa624c61aa8195c3ed0661afe3fc8bc6a97','38975b6de739802120b8b5f4b95f585df4383515d3bc6236864e40f88c4bdc9c','verification',4,'81bda3e9d27685c6cbff6873a0eb01a2bdc962ae06d3c910d7027e15c59baef1','{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","subject":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"present","ok":true,"verdict":"ok"}}','2026-11-02T00:00:03.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(5,'38975b6de739802120b8b5f4b95f585df4383515d3bc6236864e40f88c4bdc9c','3d30d7a4ea480790e98c1a8b13314f0fd73e17022cb16dfee561a6e699729271','verification',4,'5005a6a42fa7b8354618ec07265d86ce60c493f342151587b56f5bbb866cf968','{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","subject":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":false,"verdict":"altered"}}','2026-11-02T00:00:04.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(6,'3d30d7a4ea480790e98c1a8b13314f0fd73e17022cb16dfee561a6e699729271','5c286e9812be7dba9d7905c59917656abed95203319a9a3091dab06af1bff8a7','verification',4,'e792d68cb88724c9b15cb98b197a355ff8361455fa588be4b892cc7ecda8f5c1','{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","subject":{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"sha256:897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"},"verification":{"level":"digest","ok":true,"verdict":"ok"}}','2026-11-02T00:00:05.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(7,'5c286e9812be7dba9d7905c59917656abed95203319a9a3091dab06af1bff8a7','766062b8c869fe6fd9b711da12a20d7a8edb5334a8c3b5f9b359f88602337fee','claim',4,'be5caef664061e7f6f4ee3979b3547eea1d55bd20e5f7c40d61225a616507849','{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:06.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(8,'766062b8c869fe6fd9b711da12a20d7a8edb5334a8c3b5f9b359f88602337fee','69110e33bc7c323cc385d4445ef826068545f5f785dadff8b7a36fe56ebe479e','registration',4,'7cb3782cd4c03561258da2d0b269da9ec76fb5d1cb3c4d7cb1cc4ca345b2fff2','{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"version":"1"}','2026-11-02T00:00:07.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(9,'69110e33bc7c323cc385d4445ef826068545f5f785dadff8b7a36fe56ebe479e','eb5234c592b9ab9f7fa37ddc407d4b3a89281f52920b5d02df2770478fecc9de','claim',4,'84dcf57b203563da93a6ba4b881467e821cc8dd6fff8250d0d0abc3ea3648791','{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","name":"model","registry":"https://models.example","subject":{"checkpoint_digest":"sha256:6d5cf85af0c556a58f7efe03bf4774e57071cd0693f2d7d3539c8b6d38193e26","fingerprint":"f2f29aa003f34aad543d34a3e5a482e632e33e48b4bc6691105815cfc063a2bd","format":"orbax","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-orbax","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:08.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(10,'eb5234c592b9ab9f7fa37ddc407d4b3a89281f52920b5d02df2770478fecc9de','959a4136cdcc655d3acd62c9b1f4a8c9351a8fc1d4cab083d7dc670e8bdf19c3','claim',4,'1a7d2b586de62d7517a67bb63576968dd31a37c8071dfb9da9119c01f2e18561','{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","name":"dropped","registry":"https://models.example","subject":{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"sha256:897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"}}','2026-11-02T00:00:09.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(11,'959a4136cdcc655d3acd62c9b1f4a8c9351a8fc1d4cab083d7dc670e8bdf19c3','124b131fb59ce3db2cc1b30e369c6eb612072e97d0c43f083a7d5294b8193493','release',4,'a99afc48fe66612037d58b7d030016a04411bb764fe29e0a7d0463dc6b380c1e','{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","name":"dropped","registry":"https://models.example","subject":{"checkpoint_digest":"sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244","fingerprint":"3a503e7e3aae8ed3e54b2dfe58bad908283458c9d7cc7815f49ac8d9e4ad190d","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/only-verified","weights_digest":"sha256:897bcc836c3cc5bc21fda78ba17299c2f433904f1b5fc178ea8681b522911b7d"}}','2026-11-02T00:00:10.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(12,'124b131fb59ce3db2cc1b30e369c6eb612072e97d0c43f083a7d5294b8193493','c26ea1a175843218024934af81b13ea57211847b96dc24e95aeb84c48e8b59f7','conversion',4,'8511f312eeb07c54dce60fbda81a9025371f1d6d60e3399ee5e5738dbc130150','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:40:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"96b8ef9c2838f5f5a329871e0268cd4274dc2fa6fb59f4b7e99810fb0474aeed","resumed_bytes":0,"schema":2,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"sha256:b9d17232a4c83d9928ee0d4e6fab81d3802cd3bf898149558e1abf8b24e1ba49","fingerprint":"0c3ec1e30edcde1e52fbc6f027ba48f283036f0ae9f513c96ba4d7102db2c9d0","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:40:00.000+00:00","target":{"checkpoint_digest":"sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","fingerprint":"ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-2-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:11.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(13,'c26ea1a175843218024934af81b13ea57211847b96dc24e95aeb84c48e8b59f7','cb86d8af540bc5edd89420a33a810f5ed8b0d1d163e8e9b7ddea111f762e2d83','sighting',4,'0ec29bf12032d19cbc65eca1c615ec10cd5857a748a144b34f1aa5653e99b614','{"checkpoint_digest":"sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","subject":{"checkpoint_digest":"sha256:9340198b99814ecc85208017d5e17557e3cf4ecb89f3762e8c261c4c138e267d","fingerprint":"41007749b2f4dfe981be1eefc119cd1a1ea8434b83b1804f2da7590a42718506","format":"t5x","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":100,"tensors":2,"uri":"/checkpoints/run/100","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"}}','2026-11-02T00:00:12.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(14,'cb86d8af540bc5edd89420a33a810f5ed8b0d1d163e8e9b7ddea111f762e2d83','629f408061661bc91c156a7799a8c7ff8f24e68552c3863b3eb426111a0cd9a7','promotion',4,'b26d8d3120401bbb696fb66cec83200fcf2da293ab96d49925a2c7890a8ab871','{"alias":"champion","checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","name":"model","subject":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"version":"1"}','2026-11-02T00:00:13.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(15,'629f408061661bc91c156a7799a8c7ff8f24e68552c3863b3eb426111a0cd9a7','20a475e94149cba793d823629a2bc0c19e194fb65ac851c4d9cedb432ef8828d','deletion',4,'f4ec2fa325befe8c88cafd00dc371d9a83f57362177f23ccc98826ceb6c4f453','{"by":"prune","checkpoint_digest":"sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","reason":"keep_last","subject":{"checkpoint_digest":"sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16","fingerprint":"ee699d30340209fad34809d85b292c4173b675e4fd059e1d074b63efee820e16","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-2-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"uri":"/checkpoints/run-2-hf"}','2026-11-02T00:00:14.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(16,'20a475e94149cba793d823629a2bc0c19e194fb65ac851c4d9cedb432ef8828d','213a03ca80125f246450628e0cffffc7de614860e1413600998a4477676babc0','note',4,'db1ee105b4f329c7b7b2bc8db2778308ad1fd6c13ee4748a8c247c75775f0d93','{"text":"about no checkpoint"}','2026-11-02T00:00:15.000+00:00','2026-11-02T00:00:00.000+00:00');
INSERT INTO "statement" VALUES(17,'213a03ca80125f246450628e0cffffc7de614860e1413600998a4477676babc0','05f8f80dbf681ac9b6457ed54413396ab81eb0c058fc98d166739e71c7eea466','conversion',4,'406dcaf1fef70c2d0c5e96cd1ddc57e367005f9e68e53dd65b45246a749f5f5b','{"bytes_read":0,"bytes_written":0,"finished":"2026-11-01T02:50:30.000+00:00","group":"","lossless":true,"note":null,"options":{"scan_layers":true},"plan_digest":"c74319ccc9ea9477e3e2ce106cbb673bf619124a9d2b993cdbc1e02f4d2a5a6c","resumed_bytes":0,"schema":2,"seconds":30.0,"snippet":"","software":{"wherry":"0.1.0"},"source":{"checkpoint_digest":"sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee","fingerprint":"2721cedef9a1810ae9e260f259f4f0d73cd50cc1a377f25eaeb08e7222625249","format":"huggingface","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-hf","weights_digest":"sha256:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"started":"2026-11-01T02:50:00.000+00:00","target":{"checkpoint_digest":"blake3:d413b781dbbfca725815d92a9ca7572e8c73d18f7f33e24a103d5029fdddee09","fingerprint":"1c5f902ea0766a9972a3e5522a1821218c7704695f67d9c676b45c29a4f1b27c","format":"dcp","format_version":null,"kind":"params","nbytes":68,"parameters":17,"step":null,"tensors":2,"uri":"/checkpoints/run-dcp","weights_digest":"blake3:69f44b009a293d0ecdc33ada8cb51a90f731fefde7291f8a6982ae0dd4867974"},"verification":{"level":"digest","ok":true},"warnings":[]}','2026-11-02T00:00:18.000+00:00','2026-11-02T00:00:00.000+00:00');
CREATE TABLE tombstone (
	checkpoint_digest VARCHAR(71) NOT NULL, 
	uri VARCHAR NOT NULL, 
	time VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, uri), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "tombstone" VALUES('sha256:ee56583a430778354d4b1b8cfd624cc00a476fe9353c4f793ae9e198bcdeab16','/checkpoints/run-2-hf','2026-11-02T00:00:14.000+00:00',15);
CREATE TABLE verification (
	checkpoint_digest VARCHAR(71) NOT NULL, 
	level VARCHAR NOT NULL, 
	verdict VARCHAR NOT NULL, 
	time VARCHAR NOT NULL, 
	statement INTEGER NOT NULL, 
	PRIMARY KEY (checkpoint_digest, level), 
	FOREIGN KEY(checkpoint_digest) REFERENCES checkpoint (checkpoint_digest), 
	FOREIGN KEY(statement) REFERENCES statement (seq)
);
INSERT INTO "verification" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','present','ok','2026-11-02T00:00:03.000+00:00',4);
INSERT INTO "verification" VALUES('sha256:3b6d30a9ebc2e7f5a9f558a036092b683dc0bce9df7906a52cfcb9f343cbb6ee','digest','altered','2026-11-02T00:00:04.000+00:00',5);
INSERT INTO "verification" VALUES('sha256:fd0b3ec4eab14943e955e696eae9030f7738ec584b9645c68d9d2b092b9f6244','digest','ok','2026-11-02T00:00:05.000+00:00',6);
CREATE INDEX conversion_source ON conversion (source_fingerprint, source_uri);
CREATE INDEX edge_statement ON edge (statement);
CREATE INDEX ix_checkpoint_weights_digest ON checkpoint (weights_digest);
CREATE INDEX ix_conversion_source ON conversion (source);
CREATE INDEX ix_conversion_target ON conversion (target);
CREATE INDEX ix_conversion_target_uri ON conversion (target_uri);
CREATE INDEX ix_edge_target ON edge (target);
CREATE INDEX ix_statement_content ON statement (content);
CREATE INDEX location_uri ON location (uri, statement);
CREATE INDEX registration_name ON registration (registry, name);
CREATE INDEX statement_kind ON statement (kind, seq);
CREATE UNIQUE INDEX statement_prev ON statement (prev);
CREATE TRIGGER statement_no_update BEFORE UPDATE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER statement_no_delete BEFORE DELETE ON statement BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: statement'); END;
CREATE TRIGGER edge_no_update BEFORE UPDATE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
CREATE TRIGGER edge_no_delete BEFORE DELETE ON edge BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: edge'); END;
CREATE TRIGGER statement_continues BEFORE INSERT ON statement WHEN NEW.seq <> coalesce((SELECT max(seq) FROM statement), 0) + 1 OR NEW.prev <> coalesce((SELECT hash FROM statement ORDER BY seq DESC LIMIT 1), '0000000000000000000000000000000000000000000000000000000000000000') BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: this does not continue its chain'); END;
COMMIT;
